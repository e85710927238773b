//! What tests of netlink make and look at.

use super::*;

/// A request with the sequence number 9.
pub fn request(kind: u16, flags: u16, body: &[u8]) -> Vec<u8> {
    let header = Header { len: 0, kind, flags: flags | NLM_F_REQUEST, sequence: 9, port: 0 };
    Message { bytes: bytemuck::bytes_of(&header).to_vec() }.body(body).finish()
}

/// The header of a message.
pub fn header(bytes: &[u8]) -> Header {
    bytemuck::pod_read_unaligned(&bytes[..HEADER])
}

#[test]
fn a_second_dump_at_once_is_refused() {
    let _sandbox = crate::testing::Sandbox::new();
    let service: Service = |header, _, port| {
        let body = [&[1, 0, 0, 0][..], &[0; 20]].concat();
        super::super::socket_diagnosis::carry_out(header, &body, port)
    };
    let twice = request(20, NLM_F_DUMP, &[]).repeat(2);
    let Answers { datagrams, dump, .. } = answer(&twice, 5, usize::MAX, service);
    assert!(dump.is_some() && datagrams.len() == 1);
    assert_eq!(datagrams[0][HEADER..HEADER + 4], (-Errno::EBUSY.0).to_ne_bytes());
}
