//! Records by key, of which a file has each change by itself.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::ops::Deref;

/// Records by key. It notes which of them have changed since [`Table::take_changes`].
#[derive(Clone, Debug)]
pub struct Table<V> {
    records: BTreeMap<String, V>,
    changed: BTreeSet<String>,
}

/// What became of one record, as a line of the file has it.
#[derive(Serialize, Deserialize)]
pub struct Change<V> {
    /// Which table it is of, where a file has several.
    pub table: String,
    /// Its key.
    pub key: String,
    /// The record; none: it was removed.
    pub value: Option<V>,
}

impl<V> Table<V> {
    /// Adds or replaces a record.
    pub fn insert(&mut self, key: String, value: V) {
        self.changed.insert(key.clone());
        self.records.insert(key, value);
    }

    /// Removes a record; whether it was there.
    pub fn remove(&mut self, key: &str) -> Option<V> {
        let removed = self.records.remove(key)?;
        self.changed.insert(key.to_owned());
        Some(removed)
    }

    /// A record that is about to be changed.
    pub fn get_mut(&mut self, key: &str) -> Option<&mut V> {
        let value = self.records.get_mut(key)?;
        self.changed.insert(key.to_owned());
        Some(value)
    }

    /// A record of which something is about to be changed that the file does not have.
    pub fn get_mut_unsaved(&mut self, key: &str) -> Option<&mut V> {
        self.records.get_mut(key)
    }

    /// Keeps the records for which this is true.
    pub fn retain(&mut self, mut keeps: impl FnMut(&str, &V) -> bool) {
        let changed = &mut self.changed;
        self.records.retain(|key, value| {
            let stays = keeps(key, value);
            if !stays {
                changed.insert(key.clone());
            }
            stays
        });
    }

    /// Does what a line of the file says.
    pub fn apply(&mut self, change: Change<V>) {
        match change.value {
            Some(value) => drop(self.records.insert(change.key, value)),
            None => drop(self.records.remove(&change.key)),
        }
    }
}

impl<V: Serialize> Table<V> {
    /// What has changed since the last call, a line each, in a file where the table has this name.
    pub fn take_changes(&mut self, table: &str) -> Vec<u8> {
        let mut lines = Vec::new();
        for key in mem::take(&mut self.changed) {
            let change = Change { table: table.to_owned(), value: self.records.get(&key), key };
            serde_json::to_writer(&mut lines, &change).expect("plain data");
            lines.push(b'\n');
        }
        lines
    }
}

impl<V> Deref for Table<V> {
    type Target = BTreeMap<String, V>;

    fn deref(&self) -> &Self::Target {
        &self.records
    }
}

impl<V> Default for Table<V> {
    fn default() -> Self {
        BTreeMap::new().into()
    }
}

impl<V> From<BTreeMap<String, V>> for Table<V> {
    fn from(records: BTreeMap<String, V>) -> Self {
        Self { records, changed: BTreeSet::new() }
    }
}

impl<V: Serialize> Serialize for Table<V> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.records.serialize(serializer)
    }
}

impl<'a, V: Deserialize<'a>> Deserialize<'a> for Table<V> {
    fn deserialize<D: Deserializer<'a>>(deserializer: D) -> Result<Self, D::Error> {
        BTreeMap::deserialize(deserializer).map(Self::from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_are_told_once_and_lead_to_the_same() {
        let mut table = Table::default();
        let mut copy = Table::default();
        let mut pass_on = |table: &mut Table<u64>| {
            let lines = table.take_changes("t");
            let lines = String::from_utf8(lines).unwrap();
            for line in lines.lines() {
                let change: Change<u64> = serde_json::from_str(line).unwrap();
                assert_eq!(change.table, "t");
                copy.apply(change);
            }
            assert_eq!(**table, *copy);
            lines.lines().count()
        };
        for (key, value) in [("a", 1), ("b", 2), ("c", 3)] {
            table.insert(key.to_owned(), value);
        }
        assert_eq!(pass_on(&mut table), 3);
        assert_eq!(pass_on(&mut table), 0);
        *table.get_mut("b").unwrap() = 7;
        *table.get_mut("b").unwrap() += 1;
        assert_eq!(table.remove("a"), Some(1));
        assert_eq!((table.remove("a"), table.get_mut("a")), (None, None));
        assert_eq!(pass_on(&mut table), 2);
        table.retain(|_, &value| value == 8);
        assert_eq!(pass_on(&mut table), 1);
        *table.get_mut_unsaved("b").unwrap() = 9;
        assert!(table.take_changes("t").is_empty());
    }
}
