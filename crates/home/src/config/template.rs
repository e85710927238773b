//! `template`: whether copies are forked, and what the interpreter is built from.

use serde::de::{self, Deserializer, MapAccess, Visitor, value::MapAccessDeserializer};
use serde::{Deserialize, Serialize};
use std::fmt;

/// The two kinds of template of a function. In `thaw.toml` either `true`, which is `fork`, or a
/// table.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TemplateConfig {
    /// Whether a live template of the function is kept, from which instances are forked
    /// instead of booted from the image.
    pub fork: bool,
    /// The runtime template that the function is built from: the language; `None`: it is
    /// started from nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub from: Option<TemplateLanguage>,
    /// Modules that the runtime template has loaded besides the usual ones.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub modules: Vec<String>,
}

/// A language that has runtime templates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TemplateLanguage {
    /// CPython, 3.10 and later.
    Python3,
    /// Node.js, 20 and later.
    Node,
    /// CRuby, 3.1 and later.
    Ruby,
    /// OpenJDK, 17 and later.
    Java,
    /// The command line interpreter of PHP, 8.2 and later.
    Php,
    /// That of the command.
    Auto,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    #[serde(default)]
    fork: bool,
    from: Option<TemplateLanguage>,
    #[serde(default)]
    modules: Vec<String>,
}

/// Most modules of a runtime template.
const MODULES_MAX: usize = 256;

impl TemplateConfig {
    /// Whether the key need not be written.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }

    fn checked(table: Table) -> Result<Self, String> {
        let Table { fork, from, modules } = table;
        if !modules.is_empty() && from.is_none() {
            return Err("`modules` are those of a runtime template; say which with `from`".into());
        }
        if !modules.is_empty() && from == Some(TemplateLanguage::Java) {
            return Err("templates of Java load no `modules`; leave them out".into());
        }
        if !modules.is_empty() && from == Some(TemplateLanguage::Php) {
            return Err("templates of PHP load no `modules`; leave them out".into());
        }
        if !modules.is_empty() && from == Some(TemplateLanguage::Auto) {
            return Err("`modules` are those of a language; say which with `from`".into());
        }
        if modules.len() > MODULES_MAX {
            return Err(format!("a template loads {MODULES_MAX} modules at most; name fewer"));
        }
        if let Some(language) = from
            && let Some(module) = modules.iter().find(|name| !language.is_module(name))
        {
            let example = language.example();
            return Err(format!("`{module}` is no name of a module, such as {example}"));
        }
        Ok(Self { fork, from, modules })
    }
}

impl TemplateLanguage {
    /// Whether a text can be the name of a module that this language loads.
    fn is_module(self, name: &str) -> bool {
        let is_path = match self {
            Self::Python3 => is_dotted_name(name),
            Self::Node => is_node_package(name),
            Self::Ruby => is_ruby_feature(name),
            Self::Java | Self::Php | Self::Auto => false,
        };
        name.len() <= 255 && is_path
    }

    /// The name of some module.
    fn example(self) -> &'static str {
        match self {
            Self::Python3 => "flask.json",
            Self::Node => "express or @scope/package",
            Self::Ruby => "sinatra/base",
            Self::Java | Self::Php | Self::Auto => "none",
        }
    }
}

/// Whether a text is names with dots between them.
fn is_dotted_name(text: &str) -> bool {
    let is_name = |part: &str| {
        !part.is_empty()
            && !part.starts_with(|c: char| c.is_ascii_digit())
            && part.chars().all(|c| c.is_alphanumeric() || c == '_')
    };
    text.split('.').all(is_name)
}

/// Whether a text is what Ruby's `require` looks for on its path: names with slashes between
/// them.
fn is_ruby_feature(text: &str) -> bool {
    let is_name = |part: &str| {
        part.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_')
            && part.chars().all(|c| c.is_ascii_alphanumeric() || "-._".contains(c))
    };
    text.split('/').all(is_name)
}

/// Whether a text is the name of an npm package, maybe with a path within it.
fn is_node_package(text: &str) -> bool {
    let is_name = |part: &str| {
        part.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_')
            && part.chars().all(|c| c.is_ascii_alphanumeric() || "-._~".contains(c))
    };
    let (is_scoped, rest) = text.strip_prefix('@').map_or((false, text), |rest| (true, rest));
    rest.split('/').all(is_name) && (!is_scoped || rest.contains('/'))
}

impl<'de> Deserialize<'de> for TemplateConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;

        impl<'de> Visitor<'de> for Either {
            type Value = TemplateConfig;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("true, false, or a table with `fork`, `from` and `modules`")
            }

            fn visit_bool<E: de::Error>(self, fork: bool) -> Result<TemplateConfig, E> {
                Ok(TemplateConfig { fork, ..TemplateConfig::default() })
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<TemplateConfig, A::Error> {
                let table = Table::deserialize(MapAccessDeserializer::new(map))?;
                TemplateConfig::checked(table).map_err(de::Error::custom)
            }
        }

        deserializer.deserialize_any(Either)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<TemplateConfig, toml::de::Error> {
        #[derive(Deserialize)]
        struct Document {
            template: TemplateConfig,
        }
        toml::from_str::<Document>(text).map(|document| document.template)
    }

    #[test]
    fn a_word_or_a_table() {
        let fork = TemplateConfig { fork: true, ..TemplateConfig::default() };
        assert_eq!(parse("template = true").unwrap(), fork);
        assert!(parse("template = false").unwrap().is_default());
        let both = "[template]\nfork = true\nfrom = 'python3'\nmodules = ['flask', 'a.b_1']";
        let parsed = parse(both).unwrap();
        assert_eq!((parsed.fork, parsed.from), (true, Some(TemplateLanguage::Python3)));
        assert_eq!(parsed.modules, ["flask", "a.b_1"]);
        let again = toml::Value::try_from(&parsed).unwrap();
        assert_eq!(again.try_into::<TemplateConfig>().unwrap(), parsed);
    }

    #[test]
    fn modules_need_a_language_that_loads_some() {
        assert_eq!(parse("[template]\nfrom = 'auto'").unwrap().from, Some(TemplateLanguage::Auto));
        for (from, why) in [
            ("auto", "say which"),
            ("java", "templates of Java load no"),
            ("php", "templates of PHP load no"),
        ] {
            let refused = parse(&format!("[template]\nfrom = '{from}'\nmodules = ['a']"));
            assert!(refused.unwrap_err().to_string().contains(why), "{from}");
        }
    }

    #[test]
    fn each_language_names_modules_its_own_way() {
        let parsed =
            parse("[template]\nfrom = 'node'\nmodules = ['express', '@a/b', 'c/lib/d.js']");
        assert_eq!(parsed.unwrap().from, Some(TemplateLanguage::Node));
        assert!(parse("[template]\nfrom = 'python3'\nmodules = ['@a/b']").is_err());
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for (text, word) in [
            ("modules = ['flask']", "from"),
            ("from = 'python3'\nmodules = ['-c']", "no name"),
            ("from = 'python3'\nmodules = ['a..b']", "no name"),
            ("from = 'node'\nmodules = ['../x']", "no name"),
            ("from = 'node'\nmodules = ['@scope']", "no name"),
            ("from = 'node'\nmodules = ['/etc/x']", "no name"),
            ("from = 'ruby'\nmodules = ['./x']", "no name"),
            ("from = 'cobol'", "python3"),
            ("form = 'python3'", "from"),
        ] {
            let error = parse(&format!("[template]\n{text}")).unwrap_err().to_string();
            assert!(error.contains(word), "{text}: {error}");
        }
        let many = vec!["'a'"; MODULES_MAX + 1].join(",");
        let text = format!("[template]\nfrom = 'python3'\nmodules = [{many}]");
        assert!(parse(&text).unwrap_err().to_string().contains("at most"));
    }
}
