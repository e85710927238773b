//! Tests of the file systems as a whole.
