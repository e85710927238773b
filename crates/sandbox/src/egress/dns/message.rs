//! DNS messages (RFC 1035): reading questions, writing answers.

use std::net::IpAddr;

use hickory_proto::op::{Edns, Message, MessageType, Metadata, OpCode, Query, ResponseCode};
use hickory_proto::rr::{DNSClass, Name, RData, Record, RecordType};

/// How long an answer may be kept, in seconds. The host's resolver does not say
/// how old its answer is.
const TTL: u32 = 30;
/// Most addresses in one answer.
const ADDRESSES_MAX: usize = 24;

/// A question that can be answered, with all that the answer needs.
#[derive(Debug)]
pub struct Question {
    /// The name, in lower case and without a final dot; `None` if it is none
    /// that a host can have.
    pub name: Option<String>,
    metadata: Metadata,
    query: Query,
    has_edns: bool,
    max_payload: usize,
}

/// What there is to say to a question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// These addresses, or those of them that were asked for.
    Addresses(Vec<IpAddr>),
    /// There is no such name, or none that may be asked for.
    NoSuchName,
    /// The host's resolver has failed.
    Failed,
}

/// What came in.
#[derive(Debug)]
pub enum Parsed {
    /// A question.
    Question(Box<Question>),
    /// Something that is answered at once.
    Answer(Vec<u8>),
    /// Something that gets no answer.
    Nothing,
}

/// Reads a message from a sandbox.
pub fn parse(bytes: &[u8]) -> Parsed {
    let Ok(message) = Message::from_vec(bytes) else {
        let id = match bytes {
            // A header with the response bit gets no answer, lest two programs
            // talk for ever.
            [a, b, flags, ..] if bytes.len() >= 12 && flags & 0x80 == 0 => [*a, *b],
            _ => return Parsed::Nothing,
        };
        return refuse(u16::from_be_bytes(id), OpCode::Query, ResponseCode::FormErr);
    };
    let metadata = message.metadata;
    if metadata.message_type != MessageType::Query {
        return Parsed::Nothing;
    }
    if metadata.op_code != OpCode::Query {
        return refuse(metadata.id, metadata.op_code, ResponseCode::NotImp);
    }
    let [query] = &message.queries[..] else {
        return refuse(metadata.id, metadata.op_code, ResponseCode::FormErr);
    };
    if query.query_class() != DNSClass::IN {
        return refuse(metadata.id, metadata.op_code, ResponseCode::Refused);
    }
    Parsed::Question(Box::new(Question {
        name: host_name(query.name()),
        metadata,
        query: query.clone(),
        has_edns: message.edns.is_some(),
        max_payload: message.max_payload().into(),
    }))
}

/// The name as rules write it, if it is one that a host can have: the bytes of
/// a label can be anything.
fn host_name(name: &Name) -> Option<String> {
    let mut text = name.to_ascii().to_ascii_lowercase();
    if text.ends_with('.') {
        text.pop();
    }
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    (!text.is_empty() && text.bytes().all(plain)).then_some(text)
}

fn refuse(id: u16, op_code: OpCode, code: ResponseCode) -> Parsed {
    match Message::error_msg(id, op_code, code).to_vec() {
        Ok(bytes) => Parsed::Answer(bytes),
        Err(_) => Parsed::Nothing,
    }
}

impl Question {
    /// Whether an address is asked for.
    pub fn wants_address(&self) -> bool {
        matches!(self.query.query_type(), RecordType::A | RecordType::AAAA)
    }

    /// The answer as bytes; `datagram` answers are cut to what the asker takes.
    pub fn answer(&self, outcome: &Outcome, framing: Framing) -> Option<Vec<u8>> {
        let mut message = Message::response(self.metadata.id, self.metadata.op_code);
        message.metadata = Metadata::response_from_request(&self.metadata);
        message.metadata.recursion_available = true;
        message.add_query(self.query.clone());
        if self.has_edns {
            message.set_edns(Edns::new());
        }
        match outcome {
            Outcome::Addresses(addresses) => {
                for ip in addresses.iter().take(ADDRESSES_MAX) {
                    let data = match (self.query.query_type(), ip) {
                        (RecordType::A, IpAddr::V4(ip)) => RData::A((*ip).into()),
                        (RecordType::AAAA, IpAddr::V6(ip)) => RData::AAAA((*ip).into()),
                        _ => continue,
                    };
                    message.add_answer(Record::from_rdata(self.query.name().clone(), TTL, data));
                }
            }
            Outcome::NoSuchName => message.metadata.response_code = ResponseCode::NXDomain,
            Outcome::Failed => message.metadata.response_code = ResponseCode::ServFail,
        }
        let bytes = message.to_vec().ok()?;
        if framing == Framing::Packets && bytes.len() > self.max_payload {
            return message.truncate().to_vec().ok();
        }
        Some(bytes)
    }
}

/// How messages are delimited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framing {
    /// Each is a packet (UDP).
    Packets,
    /// Each has two bytes of length before it (TCP; RFC 1035, 4.2.2).
    Stream,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn question(name: &str, kind: RecordType) -> Vec<u8> {
        let mut message = Message::query();
        message.metadata.id = 0x1234;
        message.metadata.recursion_desired = true;
        message.add_query(Query::query(Name::from_ascii(name).unwrap(), kind));
        message.to_vec().unwrap()
    }

    fn parsed(bytes: &[u8]) -> Box<Question> {
        match parse(bytes) {
            Parsed::Question(question) => question,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_addresses_of_the_type_asked_for_are_answered() {
        let question = parsed(&question("API.Example.com.", RecordType::AAAA));
        assert_eq!(question.name.as_deref(), Some("api.example.com"));
        let outcome =
            Outcome::Addresses(vec!["192.0.2.1".parse().unwrap(), "2001:db8::1".parse().unwrap()]);
        let bytes = question.answer(&outcome, Framing::Packets).unwrap();
        let answer = Message::from_vec(&bytes).unwrap();
        assert_eq!(answer.metadata.id, 0x1234);
        assert!(answer.metadata.recursion_available && answer.metadata.recursion_desired);
        assert_eq!(answer.answers.len(), 1);
        assert_eq!(answer.answers[0].record_type(), RecordType::AAAA);
    }

    #[test]
    fn a_long_answer_is_cut_for_packets_only() {
        let name = format!("{0}.{0}.{0}.example.com.", "x".repeat(60));
        let question = parsed(&question(&name, RecordType::AAAA));
        let addresses = (0..64).map(|n| IpAddr::V6((0x2001_0db8_u128 << 96 | n).into())).collect();
        let outcome = Outcome::Addresses(addresses);
        let bytes = question.answer(&outcome, Framing::Packets).unwrap();
        assert!(bytes.len() <= 512 && Message::from_vec(&bytes).unwrap().metadata.truncation);
        let bytes = question.answer(&outcome, Framing::Stream).unwrap();
        assert_eq!(Message::from_vec(&bytes).unwrap().answers.len(), ADDRESSES_MAX);
    }

    #[test]
    fn names_with_strange_bytes_are_no_names() {
        let mut bytes = question("abc.example.com.", RecordType::A);
        bytes[13] = b'.';
        assert_eq!(parsed(&bytes).name, None);
        bytes[13] = 0;
        assert_eq!(parsed(&bytes).name, None);
    }

    #[test]
    fn what_is_no_question_is_refused_or_dropped() {
        assert!(matches!(parse(b""), Parsed::Nothing));
        assert!(matches!(parse(&[0; 12]), Parsed::Answer(_)));
        let mut bytes = question("a.example.com.", RecordType::A);
        bytes.truncate(20);
        assert!(matches!(parse(&bytes), Parsed::Answer(_)));
        let mut bytes = question("a.example.com.", RecordType::A);
        bytes[2] |= 0x80;
        assert!(matches!(parse(&bytes), Parsed::Nothing));
    }

    /// No bytes whatever make the parser panic.
    #[test]
    fn arbitrary_bytes_are_survived() {
        let mut random = 0x9e37_79b9_7f4a_7c15_u64;
        let mut next = || {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random
        };
        let valid = question("api.example.com.", RecordType::A);
        for _ in 0..50_000 {
            let mut bytes = valid.clone();
            for _ in 0..next() % 8 {
                let at = next() as usize % bytes.len();
                bytes[at] = next() as u8;
            }
            bytes.truncate(next() as usize % (valid.len() + 1));
            if let Parsed::Question(question) = parse(&bytes) {
                let _ = question.answer(&Outcome::NoSuchName, Framing::Packets);
            }
        }
    }
}
