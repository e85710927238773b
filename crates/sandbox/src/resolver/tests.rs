//! The process itself, which this test binary becomes.

use super::*;
