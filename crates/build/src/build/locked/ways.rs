//! When each package of a lock file is wanted: the ways that lead to it, and their conditions.

use super::{check_marker, normal};
use std::collections::{BTreeMap, BTreeSet};

/// Most ways that lead to one package and of which none says less than another.
const WAYS_MAX: usize = 64;
/// Most conditions on one way.
const CONDITIONS_MAX: usize = 32;
/// Most steps from package to package.
const STEPS_MAX: usize = 200_000;

/// A package by its number in the lock file, or what one of its extras adds.
type Node = (usize, Option<String>);
/// The conditions on one way, by their numbers: all of them hold.
type Way = BTreeSet<usize>;

/// That a package, or one of its extras, needs another one.
#[derive(Clone, Debug)]
pub(super) struct Edge {
    /// The other one's number.
    pub to: usize,
    /// Extras of the other one.
    pub extras: Vec<String>,
    /// The condition; empty: none.
    pub marker: String,
}

/// What a package needs, or what one of its extras adds to that.
pub(super) type Edges<'a> = dyn Fn(usize, Option<&str>) -> Result<Vec<Edge>, String> + 'a;

/// The packages that are reached from `roots`, each with its marker; empty: always.
///
/// # Errors
/// A marker is none, or too many ways lead to a package.
pub(super) fn wanted(
    roots: Vec<Edge>,
    edges: &Edges<'_>,
) -> Result<BTreeMap<usize, String>, String> {
    let mut search = Search::default();
    for edge in roots {
        search.follow(&Way::new(), &edge)?;
    }
    while let Some(((number, extra), way)) = search.left.pop() {
        for edge in edges(number, extra.as_deref())? {
            search.follow(&way, &edge)?;
        }
    }
    let packages = search.ways.iter().filter(|((_, extra), _)| extra.is_none());
    Ok(packages.map(|((number, _), ways)| (*number, search.marker(ways))).collect())
}

#[derive(Default)]
struct Search {
    markers: Vec<String>,
    ways: BTreeMap<Node, Vec<Way>>,
    /// Ways whose ends have not been looked at.
    left: Vec<(Node, Way)>,
    steps: usize,
}

impl Search {
    /// Goes on from the end of a way.
    fn follow(&mut self, way: &Way, edge: &Edge) -> Result<(), String> {
        let mut way = way.clone();
        let marker = check_marker(&edge.marker)?;
        if !marker.is_empty() {
            let known = self.markers.iter().position(|known| known == marker);
            way.insert(known.unwrap_or_else(|| {
                self.markers.push(marker.to_owned());
                self.markers.len() - 1
            }));
        }
        let extras = edge.extras.iter().map(|extra| (edge.to, Some(normal(extra))));
        for node in [(edge.to, None)].into_iter().chain(extras) {
            self.arrive(node, &way)?;
        }
        Ok(())
    }

    /// Keeps a way unless one says as much with fewer conditions.
    fn arrive(&mut self, node: Node, way: &Way) -> Result<(), String> {
        self.steps += 1;
        let ways = self.ways.entry(node.clone()).or_default();
        if ways.iter().any(|known| known.is_subset(way)) {
            return Ok(());
        }
        ways.retain(|known| !way.is_subset(known));
        ways.push(way.clone());
        if ways.len() > WAYS_MAX || way.len() > CONDITIONS_MAX || self.steps > STEPS_MAX {
            return Err(
                "too many conditions lead to one package; export the lock file to a requirements.txt, and \
                 name that as `requirements`"
                    .to_owned(),
            );
        }
        self.left.push((node, way.clone()));
        Ok(())
    }

    /// Ways as a marker: one of them is open.
    fn marker(&self, ways: &[Way]) -> String {
        let one = |way: &Way| {
            let mut all: Vec<String> =
                way.iter().map(|number| format!("({})", self.markers[*number])).collect();
            all.sort();
            all.join(" and ")
        };
        let mut all: Vec<String> = ways.iter().map(one).collect();
        all.sort();
        all.join(" or ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn edge(to: usize, marker: &str) -> Edge {
        Edge { to, extras: Vec::new(), marker: marker.to_owned() }
    }

    #[test]
    fn a_way_without_conditions_makes_the_others_needless() {
        let edges = |number: usize, extra: Option<&str>| {
            Ok(match (number, extra) {
                (0, None) => vec![edge(2, "os_name == 'nt'"), edge(3, "b")],
                (1, None) => vec![edge(2, "python_version < '3'"), edge(4, "")],
                (4, None) => vec![edge(4, ""), edge(1, ""), edge(3, "")],
                (1, Some("x")) => vec![edge(5, "")],
                _ => Vec::new(),
            })
        };
        let with_extra = Edge { extras: vec!["X".to_owned()], ..edge(1, "a") };
        let found = wanted(vec![edge(0, ""), with_extra], &edges).unwrap();
        assert_eq!(found[&0], "");
        assert_eq!(found[&2], "(a) and (python_version < '3') or (os_name == 'nt')");
        // By 0 under b, by 1 and 4 under a.
        assert_eq!(found[&3], "(a) or (b)");
        assert_eq!(found[&5], "(a)");
        assert_eq!(found.len(), 6);
    }

    #[test]
    fn a_hostile_lock_file_ends() {
        // Each package needs the next one under two conditions: 2^n ways.
        let edges = |number: usize, _: Option<&str>| {
            let two = [format!("a == '{number}'"), format!("b == '{number}'")];
            Ok(two.iter().map(|marker| edge((number + 1) % 1000, marker)).collect())
        };
        let error = wanted(vec![edge(0, "")], &edges).unwrap_err();
        assert!(error.contains("too many conditions"), "{error}");
        let error = wanted(vec![edge(0, "x --hash=y")], &edges).unwrap_err();
        assert!(error.contains("no marker"), "{error}");
    }
}
