//! The trace.
