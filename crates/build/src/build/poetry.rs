//! Dependencies as Poetry writes them down in a pyproject.toml, as `pip` reads them
//! (<https://python-poetry.org/docs/dependency-specification/>, PEP 440, PEP 508).

use toml::{Table, Value};

/// Keys of a dependency that comes from elsewhere than an index.
const ELSEWHERE: [&str; 4] = ["git", "path", "url", "file"];

/// The dependencies of `[tool.poetry]`, but for those of its groups and optional ones.
///
/// # Errors
/// Why `pip` could not install one of them, and the way out.
pub(super) fn dependencies(poetry: &Table) -> Result<Vec<String>, String> {
    let all = poetry.get("dependencies").and_then(Value::as_table);
    let mut found = Vec::new();
    for (name, wanted) in all.into_iter().flatten().filter(|(name, _)| *name != "python") {
        let several = match wanted {
            Value::Array(several) => several.as_slice(),
            one => std::slice::from_ref(one),
        };
        for one in several {
            let line = requirement(name, one);
            found.extend(line.map_err(|reason| {
                format!("{reason}; write a requirements.txt with `poetry export` in its place")
            })?);
        }
    }
    Ok(found)
}

/// One line of a requirements file. `None`: it is optional.
fn requirement(name: &str, wanted: &Value) -> Result<Option<String>, String> {
    check(name)?;
    let table = match wanted {
        Value::String(version) => return Ok(Some(format!("{name}{}", versions(name, version)?))),
        Value::Table(table) => table,
        _ => return Err(format!("its dependency {name} is neither a text nor a table")),
    };
    if let Some(kind) = ELSEWHERE.into_iter().find(|kind| table.contains_key(*kind)) {
        return Err(format!("its dependency {name} comes from a {kind}"));
    }
    if table.get("optional").and_then(Value::as_bool) == Some(true) {
        return Ok(None);
    }
    let text = |key: &str| table.get(key).and_then(Value::as_str);
    let extras = table.get("extras").and_then(Value::as_array).into_iter().flatten();
    let extras: Vec<&str> = extras.filter_map(Value::as_str).collect();
    extras.iter().try_for_each(|extra| check(extra))?;
    let extras = if extras.is_empty() { String::new() } else { format!("[{}]", extras.join(",")) };
    let mut markers: Vec<String> =
        text("markers").map(|text| format!("({text})")).into_iter().collect();
    if let Some(platform) = text("platform") {
        check(platform)?;
        markers.push(format!("sys_platform == '{platform}'"));
    }
    for clause in clauses(name, text("python").unwrap_or_default())? {
        let (operator, version) =
            clause.split_at(clause.find(|c: char| c.is_ascii_digit()).unwrap_or(0));
        markers.push(format!("python_full_version {operator} '{version}'"));
    }
    let version = versions(name, text("version").unwrap_or("*"))?;
    let markers =
        if markers.is_empty() { String::new() } else { format!("; {}", markers.join(" and ")) };
    Ok(Some(format!("{name}{extras}{version}{markers}")))
}

/// Refuses a name that is none.
fn check(name: &str) -> Result<(), String> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    match !name.is_empty() && name.chars().all(is_plain) {
        true => Ok(()),
        false => Err(format!("{name:?} is no name of a package")),
    }
}

/// What PEP 440 calls a version specifier.
fn versions(name: &str, constraint: &str) -> Result<String, String> {
    Ok(clauses(name, constraint)?.join(","))
}

/// The clauses of one.
fn clauses(name: &str, constraint: &str) -> Result<Vec<String>, String> {
    if constraint.contains('|') {
        return Err(format!("its dependency {name} has a choice of versions ({constraint})"));
    }
    // `>= 1` is one clause, `>=1 <2` are two.
    let mut joined = String::new();
    for word in constraint.split([' ', ',']).filter(|word| !word.is_empty()) {
        let follows_operator = joined.ends_with(|c: char| "<>=!~^".contains(c));
        if !joined.is_empty() && !follows_operator {
            joined.push(',');
        }
        joined.push_str(word);
    }
    let parts = joined.split(',').filter(|part| !part.is_empty() && *part != "*");
    parts
        .map(clause)
        .collect::<Option<Vec<_>>>()
        .map(|all| all.concat())
        .ok_or_else(|| format!("its dependency {name} has a version that is none ({constraint})"))
}

/// One clause as PEP 440 has it, which takes two for `^` and `~`.
fn clause(text: &str) -> Option<Vec<String>> {
    let version = text.trim_start_matches(|c: char| "<>=!~^".contains(c));
    let is_plain = |c: char| c.is_ascii_alphanumeric() || ".*+-!_".contains(c);
    if !version.starts_with(|c: char| c.is_ascii_digit()) || !version.chars().all(is_plain) {
        return None;
    }
    let from = format!(">={version}");
    Some(match &text[..text.len() - version.len()] {
        "" => vec![format!("=={version}")],
        "^" => vec![
            from,
            format!(
                "<{}",
                next(version, |numbers| {
                    numbers.iter().position(|number| *number != 0).unwrap_or(numbers.len() - 1)
                })?
            ),
        ],
        "~" => vec![from, format!("<{}", next(version, |numbers| 1.min(numbers.len() - 1))?)],
        "<" | ">" | "<=" | ">=" | "==" | "!=" | "~=" | "===" => vec![text.to_owned()],
        _ => return None,
    })
}

/// The first version that differs in the number that `which` names from this one.
fn next(version: &str, which: impl Fn(&[u64]) -> usize) -> Option<String> {
    let end = version.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(version.len());
    let numbers = version[..end].split('.').filter(|part| !part.is_empty());
    let mut numbers: Vec<u64> = numbers.map(|part| part.parse().ok()).collect::<Option<_>>()?;
    let at = which(&numbers);
    numbers.truncate(at + 1);
    *numbers.last_mut()? = numbers.last()?.checked_add(1)?;
    Some(numbers.iter().map(u64::to_string).collect::<Vec<_>>().join("."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constraints_of_poetry_become_specifiers() {
        for (constraint, expected) in [
            ("*", ""),
            ("", ""),
            ("1.2.3", "==1.2.3"),
            ("1.2.*", "==1.2.*"),
            ("^1.2.3", ">=1.2.3,<2"),
            ("^1.2", ">=1.2,<2"),
            ("^1", ">=1,<2"),
            ("^0.2.3", ">=0.2.3,<0.3"),
            ("^0.0.3", ">=0.0.3,<0.0.4"),
            ("^0.0", ">=0.0,<0.1"),
            ("^0", ">=0,<1"),
            ("^1.0.0b1", ">=1.0.0b1,<2"),
            ("~1.2.3", ">=1.2.3,<1.3"),
            ("~1.2", ">=1.2,<1.3"),
            ("~1", ">=1,<2"),
            ("~=1.4.2", "~=1.4.2"),
            (">=2.0,<3", ">=2.0,<3"),
            (">= 2.0 , < 3", ">=2.0,<3"),
            (">=2.0 !=2.1", ">=2.0,!=2.1"),
        ] {
            assert_eq!(versions("x", constraint).as_deref(), Ok(expected), "{constraint}");
        }
        for wrong in ["^1 || ^2", "^x", "latest", "^", "=>1", "1 $(id)", "^18446744073709551615"] {
            assert!(versions("x", wrong).is_err(), "{wrong}");
        }
    }

    fn read(text: &str) -> Result<Vec<String>, String> {
        dependencies(&text.parse().unwrap())
    }

    #[test]
    fn tables_become_extras_and_markers() {
        let all = read(
            "[dependencies]\npython = \"^3.8\"\nflask = \"^3.0\"\n\
             uvicorn = { version = \"~0.30\", extras = [\"standard\", \"x\"] }\n\
             tomli = { version = \"*\", python = \"<3.11\" }\n\
             colorama = { version = \"0.4\", markers = \"sys_platform == 'win32' or os_name == 'nt'\" }\n\
             uvloop = { platform = \"linux\" }\nspare = { version = \"1\", optional = true }\n\
             two = [{ version = \"1\", python = \"^3.8\" }, { version = \"2\", python = \">=4\" }]\n\
             [group.dev.dependencies]\npytest = \"*\"\n",
        );
        let expected = [
            "colorama==0.4; (sys_platform == 'win32' or os_name == 'nt')",
            "flask>=3.0,<4",
            "tomli; python_full_version < '3.11'",
            "two==1; python_full_version >= '3.8' and python_full_version < '4'",
            "two==2; python_full_version >= '4'",
            "uvicorn[standard,x]>=0.30,<0.31",
            "uvloop; sys_platform == 'linux'",
        ];
        let mut all = all.unwrap();
        all.sort();
        assert_eq!(all, expected);
        assert_eq!(read("name = \"x\"").unwrap(), [""; 0]);
    }

    #[test]
    fn what_pip_cannot_install_so_is_refused() {
        for (line, said) in [
            ("a = { git = \"https://example.org/a.git\" }", "comes from a git"),
            ("a = { path = \"../a\" }", "comes from a path"),
            ("a = 3", "neither"),
            ("\"a b\" = \"1\"", "no name"),
            ("a = { version = \"1\", extras = [\"x]; y\"] }", "no name"),
        ] {
            let error = read(&format!("[dependencies]\n{line}\n")).unwrap_err();
            assert!(error.contains(said) && error.contains("poetry export"), "{error}");
        }
    }
}
