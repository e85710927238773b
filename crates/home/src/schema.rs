//! Schemas of values that the API writes as text.

use crate::config::{ByteSize, CpuQuota, DomainName, EntryKind, FunctionName, Isolation};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use std::borrow::Cow;

macro_rules! text {
    ($($type:ident: $says:literal),* $(,)?) => {$(
        impl JsonSchema for $type {
            fn schema_name() -> Cow<'static, str> {
                stringify!($type).into()
            }

            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                json_schema!({ "type": "string", "description": $says })
            }
        }
    )*};
}

text! {
    FunctionName: "Name of a function.",
    DomainName: "Name of a sharing domain.",
    EntryKind: "How requests reach the program: `http`, `tcp`, `udp`, `stdin` or `sandbox`.",
    Isolation: "When an instance may serve a second request: `request` or `instance`.",
    ByteSize: "Bytes with a unit, as in `256MiB`.",
    CpuQuota: "CPU time in each period, as in `10m per 1h`.",
}
