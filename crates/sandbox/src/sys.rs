//! Host calls that no safe wrapper offers.
