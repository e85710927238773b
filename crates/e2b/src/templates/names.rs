//! Names of templates, as clients write them: `NAME`, `NAME:TAG`, and either with `OWNER/` before it.

use crate::problem::Problem;

/// The tag that is meant where none is named.
pub const DEFAULT_TAG: &str = "default";
/// Most bytes of a name, and of a tag.
const NAME_MAX: usize = 128;
/// Most tags of a build.
pub const TAGS_MAX: usize = 16;

/// A name of a template, and perhaps a tag.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TemplateName {
    /// The name, or the id.
    pub name: String,
    /// The tag, if one is named.
    pub tag: Option<String>,
}

impl TemplateName {
    /// What a client of an owner means by a text.
    ///
    /// # Errors
    /// No template has such a name.
    pub fn parse(text: &str, owner: &str) -> Result<Self, Problem> {
        let own = text.strip_prefix(owner).and_then(|rest| rest.strip_prefix('/')).unwrap_or(text);
        let (name, tag) = match own.split_once(':') {
            Some((name, tag)) => (name, Some(tag)),
            None => (own, None),
        };
        if !is_word(name) || !tag.is_none_or(is_word) {
            return Err(Problem::invalid(format!(
                "{:?} is no name of a template; write NAME or NAME:TAG, each of up to {NAME_MAX} \
                 letters, digits and any of -_.",
                shortened(text)
            )));
        }
        Ok(Self { name: name.to_owned(), tag: tag.map(str::to_owned) })
    }

    /// The tag, or the one that is meant without.
    pub fn tag(&self) -> &str {
        self.tag.as_deref().unwrap_or(DEFAULT_TAG)
    }
}

/// Checks tags that come in a list of their own.
///
/// # Errors
/// One is no tag, or there are too many.
pub fn check_tags(tags: &[String]) -> Result<(), Problem> {
    if let Some(wrong) = tags.iter().find(|tag| !is_word(tag)) {
        return Err(Problem::invalid(format!(
            "{:?} is no tag; a tag has up to {NAME_MAX} letters, digits and any of -_.",
            shortened(wrong)
        )));
    }
    match tags.len() > TAGS_MAX {
        true => Err(Problem::invalid(format!("a build has at most {TAGS_MAX} tags; name fewer"))),
        false => Ok(()),
    }
}

fn is_word(text: &str) -> bool {
    let is_fine = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    (1..=NAME_MAX).contains(&text.len()) && text.bytes().all(is_fine)
}

/// The beginning of a text, of at most so many bytes.
pub fn beginning(text: &str, most: usize) -> &str {
    let mut end = text.len().min(most);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// The beginning of a text that somebody else wrote.
pub fn shortened(text: &str) -> String {
    text.chars().take(NAME_MAX).collect()
}

/// A name of a container image without what is meant anyway: `docker.io/library/`, `:latest`.
pub fn plain_image(image: &str) -> &str {
    let image = image.strip_prefix("docker.io/").unwrap_or(image);
    let image = image.strip_prefix("library/").unwrap_or(image);
    image.strip_suffix(":latest").unwrap_or(image)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_has_perhaps_an_owner_and_a_tag() {
        let parsed =
            |text: &str| TemplateName::parse(text, "team-a").map(|name| (name.name, name.tag));
        let name = |tag: Option<&str>| Ok(("box".to_owned(), tag.map(str::to_owned)));
        assert_eq!(parsed("box"), name(None));
        assert_eq!(parsed("box:v1.0"), name(Some("v1.0")));
        assert_eq!(parsed("team-a/box:v1"), name(Some("v1")));
        for wrong in ["", ":", "box:", ":v1", "a b", "other/box", "../box", "a:b:c"] {
            assert!(parsed(wrong).is_err(), "{wrong}");
        }
        assert!(parsed(&"a".repeat(NAME_MAX)).is_ok());
        assert!(parsed(&"a".repeat(NAME_MAX + 1)).is_err());
        assert!(check_tags(&vec!["a".to_owned(); TAGS_MAX]).is_ok());
        assert!(check_tags(&vec!["a".to_owned(); TAGS_MAX + 1]).is_err());
        assert!(check_tags(&["a b".to_owned()]).is_err());
    }

    #[test]
    fn images_are_compared_without_what_is_meant_anyway() {
        for name in ["python", "python:latest", "docker.io/library/python", "library/python"] {
            assert_eq!(plain_image(name), "python");
        }
        assert_eq!(plain_image("registry.example/python:3"), "registry.example/python:3");
    }
}
