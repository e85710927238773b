//! Reads TOML whose tables are tables.
//!
//! What serde derives for a struct takes its fields from a list, too, in the order in which they are
//! declared: `limits = ["256MiB"]` would be read. Here every struct is a table, however deep it lies.

use super::ConfigError;
use serde::de::{
    DeserializeOwned, DeserializeSeed, Deserializer, EnumAccess, Error, MapAccess, SeqAccess,
    Visitor,
};
use std::fmt;
use std::path::Path;

/// Reads a text as TOML; `path` is for error messages.
///
/// # Errors
/// What is wrong with it, with its line and column.
pub fn from_toml<T: DeserializeOwned>(path: &Path, text: &str) -> Result<T, ConfigError> {
    read(text).map_err(|error| ConfigError::from_toml(path, text, &error))
}

pub(super) fn read<T: DeserializeOwned>(text: &str) -> Result<T, toml::de::Error> {
    T::deserialize(Tables(toml::Deserializer::parse(text)?))
}

/// A value in which structs are tables: all that is in it is wrapped, too.
struct Tables<T>(T);

/// What a type does with such a value.
struct Within<V>(V);

/// What a struct does with one: it takes a table alone.
struct Table<V> {
    visitor: V,
    keys: &'static [&'static str],
}

impl<'de, V: Visitor<'de>> Visitor<'de> for Table<V> {
    type Value = V::Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.keys.first() {
            Some(key) => write!(f, "a table, such as `{{ {key} = … }}`"),
            None => f.write_str("a table"),
        }
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<V::Value, A::Error> {
        self.visitor.visit_map(Tables(map))
    }
}

/// Methods that hand their arguments on, and have what is read wrapped.
macro_rules! deserialize {
    ($($method:ident($($argument:ident: $kind:ty),*);)*) => {$(
        fn $method<V: Visitor<'de>>(
            self,
            $($argument: $kind,)*
            visitor: V,
        ) -> Result<V::Value, D::Error> {
            self.0.$method($($argument,)* Within(visitor))
        }
    )*};
}

impl<'de, D: Deserializer<'de>> Deserializer<'de> for Tables<D> {
    type Error = D::Error;

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        keys: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        self.0.deserialize_struct(name, keys, Table { visitor, keys })
    }

    deserialize! {
        deserialize_any(); deserialize_bool(); deserialize_i8(); deserialize_i16(); deserialize_i32();
        deserialize_i64(); deserialize_i128(); deserialize_u8(); deserialize_u16(); deserialize_u32();
        deserialize_u64(); deserialize_u128(); deserialize_f32(); deserialize_f64(); deserialize_char();
        deserialize_str(); deserialize_string(); deserialize_bytes(); deserialize_byte_buf();
        deserialize_option(); deserialize_unit(); deserialize_seq(); deserialize_map();
        deserialize_identifier(); deserialize_ignored_any();
        deserialize_unit_struct(name: &'static str);
        deserialize_newtype_struct(name: &'static str);
        deserialize_tuple(len: usize);
        deserialize_tuple_struct(name: &'static str, len: usize);
        deserialize_enum(name: &'static str, variants: &'static [&'static str]);
    }

    fn is_human_readable(&self) -> bool {
        self.0.is_human_readable()
    }
}

/// Methods for values that have none in them.
macro_rules! visit {
    ($($method:ident($kind:ty);)*) => {$(
        fn $method<E: Error>(self, value: $kind) -> Result<V::Value, E> {
            self.0.$method(value)
        }
    )*};
}

impl<'de, V: Visitor<'de>> Visitor<'de> for Within<V> {
    type Value = V::Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.expecting(f)
    }

    visit! {
        visit_bool(bool); visit_i8(i8); visit_i16(i16); visit_i32(i32); visit_i64(i64);
        visit_i128(i128); visit_u8(u8); visit_u16(u16); visit_u32(u32); visit_u64(u64);
        visit_u128(u128); visit_f32(f32); visit_f64(f64); visit_char(char); visit_str(&str);
        visit_borrowed_str(&'de str); visit_string(String); visit_bytes(&[u8]);
        visit_borrowed_bytes(&'de [u8]); visit_byte_buf(Vec<u8>);
    }

    fn visit_none<E: Error>(self) -> Result<V::Value, E> {
        self.0.visit_none()
    }

    fn visit_unit<E: Error>(self) -> Result<V::Value, E> {
        self.0.visit_unit()
    }

    fn visit_some<D: Deserializer<'de>>(self, value: D) -> Result<V::Value, D::Error> {
        self.0.visit_some(Tables(value))
    }

    fn visit_newtype_struct<D: Deserializer<'de>>(self, value: D) -> Result<V::Value, D::Error> {
        self.0.visit_newtype_struct(Tables(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<V::Value, A::Error> {
        self.0.visit_seq(Tables(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<V::Value, A::Error> {
        self.0.visit_map(Tables(map))
    }

    fn visit_enum<A: EnumAccess<'de>>(self, value: A) -> Result<V::Value, A::Error> {
        // No variant of a configuration holds a struct.
        self.0.visit_enum(value)
    }
}

impl<'de, A: SeqAccess<'de>> SeqAccess<'de> for Tables<A> {
    type Error = A::Error;

    fn next_element_seed<S: DeserializeSeed<'de>>(
        &mut self,
        seed: S,
    ) -> Result<Option<S::Value>, A::Error> {
        self.0.next_element_seed(Tables(seed))
    }

    fn size_hint(&self) -> Option<usize> {
        self.0.size_hint()
    }
}

impl<'de, A: MapAccess<'de>> MapAccess<'de> for Tables<A> {
    type Error = A::Error;

    fn next_key_seed<S: DeserializeSeed<'de>>(
        &mut self,
        seed: S,
    ) -> Result<Option<S::Value>, A::Error> {
        self.0.next_key_seed(seed)
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, A::Error> {
        self.0.next_value_seed(Tables(seed))
    }

    fn size_hint(&self) -> Option<usize> {
        self.0.size_hint()
    }
}

impl<'de, S: DeserializeSeed<'de>> DeserializeSeed<'de> for Tables<S> {
    type Value = S::Value;

    fn deserialize<D: Deserializer<'de>>(self, value: D) -> Result<S::Value, D::Error> {
        self.0.deserialize(Tables(value))
    }
}

#[cfg(test)]
mod tests {
    use super::super::{FunctionConfig, Quotas};
    use std::path::Path;

    fn refused(text: &str) -> String {
        let text = format!("name = \"f\"\nrootfs = \"r\"\ncommand = [\"x\"]\nport = 80\n{text}\n");
        FunctionConfig::parse(Path::new("thaw.toml"), &text).expect_err(&text).to_string()
    }

    #[test]
    fn no_table_is_written_as_a_list() {
        for (text, key) in [
            ("secrets = [\"api-key\"]", "names"),
            ("runtime = [\"python3\"]", "kind"),
            ("limits = [\"256MiB\"]", "memory"),
            ("limits = []", "memory"),
            ("limits = 5", "memory"),
            ("entry = [\"http\"]", "kind"),
            ("hibernate = [true]", "timers"),
            ("build = [[\"make\"]]", "command"),
            ("sharing = [\"team\"]", "domain"),
            ("volumes = [[\"data\", \"/data\"]]", "name"),
            ("schedules = [[\"hourly\", \"0 * * * *\"]]", "name"),
        ] {
            let said = refused(text);
            let expected = format!("expected a table, such as `{{ {key} = … }}`");
            assert!(said.starts_with("thaw.toml:5:"), "{said}");
            assert!(said.contains("invalid type: ") && said.ends_with(&expected), "{said}");
        }
        for key in ["template", "train", "rollback", "liveness", "async", "egress"] {
            let said = refused(&format!("{key} = [\"a\"]"));
            assert!(said.contains("a table"), "{said}");
        }
    }

    #[test]
    fn nor_are_those_of_quotas() {
        let said = Quotas::parse("tenants.toml".as_ref(), "default = [5]").unwrap_err().to_string();
        assert!(said.contains("expected a table, such as"), "{said}");
    }

    #[test]
    fn what_is_wrong_deep_down_has_its_place() {
        let said = refused("[limits]\nmemory = 5");
        assert!(said.starts_with("thaw.toml:6:10: "), "{said}");
    }
}
