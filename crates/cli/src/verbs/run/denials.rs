//! What a program has wanted to reach and was denied, said when it has ended.

use thaw_home::config::EgressRule;
use thaw_sandbox::{Denied, EgressEvents};

/// Denials that the sandbox tells one by one; it tells of those after them in lots, and keeps the
/// last of them for itself.
const COUNTED: u64 = 16;

/// What was denied so far.
#[derive(Debug, Default)]
pub struct Denials {
    count: u64,
    first: Option<Denied>,
}

impl Denials {
    /// Notes some more.
    pub fn add(&mut self, events: EgressEvents) {
        self.count = self.count.saturating_add(events.denied);
        self.first = self.first.take().or_else(|| events.recent.into_iter().next());
    }

    /// A line for people, if anything was denied.
    pub fn told(&self) -> Option<String> {
        let first = self.first.as_ref()?;
        let count = match self.count {
            0..=1 => "an outgoing connection".to_owned(),
            count if count < COUNTED => format!("{count} outgoing connections"),
            count => format!("at least {count} outgoing connections"),
        };
        let such_as = if self.count > 1 { "such as " } else { "" };
        let (what, target) = match first {
            Denied::Address(..) => (format!("to {first}"), first.to_string()),
            Denied::Name(_) => {
                (format!("to {first}, which was not looked up"), format!("{first}:443"))
            }
        };
        // A sandbox may say what it likes.
        let way_out = match target.parse::<EgressRule>() {
            Ok(_) => format!("--allow-egress '{target}' allows it"),
            Err(_) => "--allow-egress TARGET:PORTS allows one".to_owned(),
        };
        Some(format!("denied {count} {such_as}{what}; {way_out}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use thaw_sandbox::Transport;

    fn events(denied: u64, first: Denied) -> EgressEvents {
        EgressEvents { denied, recent: vec![first], ..EgressEvents::default() }
    }

    fn address(text: &str, transport: Transport) -> Denied {
        Denied::Address(text.parse().unwrap(), transport)
    }

    #[test]
    fn the_first_denial_stands_for_all() {
        let mut denials = Denials::default();
        assert_eq!(denials.told(), None);
        denials.add(events(1, address("192.0.2.1:80", Transport::Tcp)));
        let one = "denied an outgoing connection to 192.0.2.1:80; --allow-egress '192.0.2.1:80' allows it";
        assert_eq!(denials.told().as_deref(), Some(one));
        denials.add(events(2, address("192.0.2.2:80", Transport::Tcp)));
        let told = denials.told().unwrap();
        assert!(
            told.starts_with("denied 3 outgoing connections such as to 192.0.2.1:80;"),
            "{told}"
        );
        denials.add(events(64, Denied::Name("a.example".to_owned())));
        assert!(denials.told().unwrap().starts_with("denied at least 67 outgoing connections"));
    }

    #[test]
    fn the_option_is_one_that_is_understood() {
        let told = |first| {
            let mut denials = Denials::default();
            denials.add(events(1, first));
            denials.told().unwrap()
        };
        for (denied, way_out) in [
            (
                address("192.0.2.1:53", Transport::Udp),
                "--allow-egress '192.0.2.1:53/udp' allows it",
            ),
            (
                address("[2001:db8::1]:443", Transport::Tcp),
                "--allow-egress '[2001:db8::1]:443' allows it",
            ),
            (
                Denied::Name("api.example.com".to_owned()),
                "--allow-egress 'api.example.com:443' allows it",
            ),
            (Denied::Name("a name".to_owned()), "--allow-egress TARGET:PORTS allows one"),
            (Denied::Name("a'b\n".to_owned()), "--allow-egress TARGET:PORTS allows one"),
        ] {
            let told = told(denied);
            assert!(told.ends_with(way_out) && !told.contains('\n'), "{told}");
        }
    }
}
