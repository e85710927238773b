//! Limits on a sandbox that the host kernel enforces.
