//! The name that somebody may have meant.

/// Mistakes that a slip may have, for each so many letters.
const LETTERS_FOR_A_MISTAKE: usize = 4;
/// Names that are longer are not compared.
const NAME_MAX: usize = 64;

/// The name that is likest to one that does not exist, if it is like it.
pub fn closest<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let allowed = (name.chars().count() / LETTERS_FOR_A_MISTAKE).max(1);
    let near = known.filter_map(|other| {
        let mistakes = mistakes(name, other).filter(|count| *count <= allowed)?;
        Some((mistakes, other))
    });
    near.min().map(|(_, other)| other)
}

/// Letters to add, remove or replace so that one name becomes the other (Levenshtein's distance).
fn mistakes(one: &str, other: &str) -> Option<usize> {
    let (one, other): (Vec<char>, Vec<char>) = (one.chars().collect(), other.chars().collect());
    if one.len().max(other.len()) > NAME_MAX {
        return None;
    }
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (i, a) in one.iter().enumerate() {
        let mut diagonal = i;
        row[0] = i + 1;
        for (j, b) in other.iter().enumerate() {
            let replaced = diagonal + usize::from(a != b);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(row[j + 1] + 1);
        }
    }
    row.last().copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slip_is_near() {
        let known = ["my-function", "hello-python", "hello-java", "box"];
        let near = |name| closest(name, known.into_iter());
        assert_eq!(near("my-fnction"), Some("my-function"));
        assert_eq!(near("hello-pyhton"), Some("hello-python"));
        assert_eq!(near("hello-jav"), Some("hello-java"));
        assert_eq!(near("bux"), Some("box"));
        for other in ["debian:12", "nginx", "", "my", "x".repeat(100).as_str()] {
            assert_eq!(near(other), None, "{other}");
        }
    }
}
