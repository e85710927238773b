//! The counters in `/proc/net` (proc(5)): of protocols (`snmp`, `snmp6`, `netstat`), of sockets
//! (`sockstat`, `sockstat6`) and of processors (`softnet_stat`).
//!
//! There are no packets here, so what counts them is 0. Sockets are counted.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use super::address::{AF_INET, AF_INET6};
use super::sockets::{ConnectionState, Walk};
use super::tcp::IPPROTO_TCP;
use super::udp::{IPPROTO_UDP, IPPROTO_UDPLITE};
use crate::errno::Result;
use crate::state::kernel;

/// Names of a protocol's counters, and which of them are not 0.
struct Counters {
    protocol: &'static str,
    names: &'static str,
    known: &'static [(&'static str, &'static str)],
}

const IP: Counters = Counters {
    protocol: "Ip",
    names: "Forwarding DefaultTTL InReceives InHdrErrors InAddrErrors ForwDatagrams InUnknownProtos \
            InDiscards InDelivers OutRequests OutDiscards OutNoRoutes ReasmTimeout ReasmReqds ReasmOKs \
            ReasmFails FragOKs FragFails FragCreates OutTransmits",
    known: &[("Forwarding", "2"), ("DefaultTTL", "64")],
};
const ICMP: Counters = Counters {
    protocol: "Icmp",
    names: "InMsgs InErrors InCsumErrors InDestUnreachs InTimeExcds InParmProbs InSrcQuenchs InRedirects \
            InEchos InEchoReps InTimestamps InTimestampReps InAddrMasks InAddrMaskReps OutMsgs OutErrors \
            OutRateLimitGlobal OutRateLimitHost OutDestUnreachs OutTimeExcds OutParmProbs OutSrcQuenchs \
            OutRedirects OutEchos OutEchoReps OutTimestamps OutTimestampReps OutAddrMasks OutAddrMaskReps",
    known: &[],
};
/// `CurrEstab` is counted.
const TCP: Counters = Counters {
    protocol: "Tcp",
    names: "RtoAlgorithm RtoMin RtoMax MaxConn ActiveOpens PassiveOpens AttemptFails EstabResets CurrEstab \
            InSegs OutSegs RetransSegs InErrs OutRsts InCsumErrors",
    known: &[("RtoAlgorithm", "1"), ("RtoMin", "200"), ("RtoMax", "120000"), ("MaxConn", "-1")],
};
const UDP_NAMES: &str = "InDatagrams NoPorts InErrors OutDatagrams RcvbufErrors SndbufErrors InCsumErrors \
                         IgnoredMulti MemErrors";
const UDP: Counters = Counters { protocol: "Udp", names: UDP_NAMES, known: &[] };
const UDP_LITE: Counters = Counters { protocol: "UdpLite", names: UDP_NAMES, known: &[] };
const TCP_EXTENSION: Counters = Counters {
    protocol: "TcpExt",
    names: "SyncookiesSent SyncookiesRecv SyncookiesFailed EmbryonicRsts PruneCalled RcvPruned OfoPruned \
            OutOfWindowIcmps LockDroppedIcmps ArpFilter TW TWRecycled TWKilled PAWSActive PAWSEstab \
            DelayedACKs DelayedACKLocked DelayedACKLost ListenOverflows ListenDrops TCPHPHits TCPPureAcks \
            TCPHPAcks TCPRenoRecovery TCPSackRecovery TCPSACKReneging TCPSACKReorder TCPRenoReorder \
            TCPTSReorder TCPFullUndo TCPPartialUndo TCPDSACKUndo TCPLossUndo TCPLostRetransmit \
            TCPRenoFailures TCPSackFailures TCPLossFailures TCPFastRetrans TCPSlowStartRetrans TCPTimeouts \
            TCPLossProbes TCPLossProbeRecovery TCPAbortOnData TCPAbortOnClose TCPAbortOnMemory \
            TCPAbortOnTimeout TCPAbortOnLinger TCPAbortFailed TCPMemoryPressures TCPBacklogDrop \
            TCPRcvQDrop TCPSynRetrans TCPOrigDataSent TCPKeepAlive",
    known: &[],
};
const IP_EXTENSION: Counters = Counters {
    protocol: "IpExt",
    names: "InNoRoutes InTruncatedPkts InMcastPkts OutMcastPkts InBcastPkts OutBcastPkts InOctets OutOctets \
            InMcastOctets OutMcastOctets InBcastOctets OutBcastOctets InCsumErrors InNoECTPkts InECT1Pkts \
            InECT0Pkts InCEPkts ReasmOverlaps",
    known: &[],
};
const IP_6: &str = "Ip6InReceives Ip6InHdrErrors Ip6InTooBigErrors Ip6InNoRoutes Ip6InAddrErrors \
                    Ip6InUnknownProtos Ip6InTruncatedPkts Ip6InDiscards Ip6InDelivers Ip6OutForwDatagrams \
                    Ip6OutRequests Ip6OutDiscards Ip6OutNoRoutes Ip6InMcastPkts Ip6OutMcastPkts Ip6InOctets \
                    Ip6OutOctets Icmp6InMsgs Icmp6InErrors Icmp6OutMsgs Icmp6OutErrors Icmp6InCsumErrors \
                    Udp6InDatagrams Udp6NoPorts Udp6InErrors Udp6OutDatagrams Udp6RcvbufErrors \
                    Udp6SndbufErrors Udp6InCsumErrors UdpLite6InDatagrams UdpLite6NoPorts UdpLite6InErrors \
                    UdpLite6OutDatagrams";

impl Counters {
    /// Two lines: the names, and the values; `counted` are those that are not always the same.
    fn lines(&self, counted: &[(&str, usize)]) -> String {
        let Self { protocol, names, known } = self;
        let mut values = String::new();
        for name in names.split_whitespace() {
            let number = counted.iter().find(|(counted, _)| *counted == name);
            match (number, known.iter().find(|(known, _)| *known == name)) {
                (Some((_, number)), _) => values += &format!(" {number}"),
                (None, Some((_, value))) => values += &format!(" {value}"),
                (None, None) => values += " 0",
            }
        }
        format!("{protocol}: {names}\n{protocol}:{values}\n")
    }
}

/// `/proc/net/snmp`.
pub fn snmp() -> Result<Vec<u8>> {
    let established = Sockets::count().established;
    let tcp = TCP.lines(&[("CurrEstab", established)]);
    let text = [IP.lines(&[]), ICMP.lines(&[]), tcp, UDP.lines(&[]), UDP_LITE.lines(&[])].concat();
    Ok(text.into_bytes())
}

/// `/proc/net/netstat`.
pub fn netstat() -> Result<Vec<u8>> {
    Ok([TCP_EXTENSION.lines(&[]), IP_EXTENSION.lines(&[])].concat().into_bytes())
}

/// `/proc/net/snmp6`.
pub fn snmp6() -> Result<Vec<u8>> {
    let lines = IP_6.split_whitespace().map(|name| format!("{name:<32}\t0\n"));
    Ok(lines.collect::<String>().into_bytes())
}

/// `/proc/net/sockstat`.
pub fn sockstat() -> Result<Vec<u8>> {
    let Sockets { all, tcp, udp, udp_lite, .. } = Sockets::count();
    let (tcp_4, udp_4, lite) = (tcp[0], udp[0], udp_lite[0]);
    let alloc = tcp[0] + tcp[1];
    let text = format!(
        "sockets: used {all}\nTCP: inuse {tcp_4} orphan 0 tw 0 alloc {alloc} mem 0\nUDP: inuse {udp_4} mem 0\n\
         UDPLITE: inuse {lite}\nRAW: inuse 0\nFRAG: inuse 0 memory 0\n"
    );
    Ok(text.into_bytes())
}

/// `/proc/net/sockstat6`.
pub fn sockstat6() -> Result<Vec<u8>> {
    let Sockets { tcp, udp, udp_lite, .. } = Sockets::count();
    let (tcp, udp, lite) = (tcp[1], udp[1], udp_lite[1]);
    let text = format!(
        "TCP6: inuse {tcp}\nUDP6: inuse {udp}\nUDPLITE6: inuse {lite}\nRAW6: inuse 0\nFRAG6: inuse 0 memory 0\n"
    );
    Ok(text.into_bytes())
}

/// `/proc/net/softnet_stat`: a line for each processor, whose number is the last but two.
pub fn softnet_stat() -> Result<Vec<u8>> {
    let cpus = kernel().config.get().cpus.max(1);
    let lines = (0..cpus).map(|cpu| {
        let zeros = "00000000 ".repeat(12);
        format!("{zeros}{cpu:08x} 00000000 00000000\n")
    });
    Ok(lines.collect::<String>().into_bytes())
}

/// How many sockets there are: of IPv4, and of IPv6.
#[derive(Default)]
struct Sockets {
    all: usize,
    tcp: [usize; 2],
    udp: [usize; 2],
    udp_lite: [usize; 2],
    /// Connections of TCP.
    established: usize,
}

impl Sockets {
    fn count() -> Self {
        let (mut counted, mut walk) = (Self::default(), Walk::default());
        while let Some(found) = walk.next(|_| true) {
            let common = found.socket.common();
            counted.all += 1;
            let family = match common.family {
                AF_INET => 0,
                AF_INET6 => 1,
                _ => continue,
            };
            match common.protocol {
                IPPROTO_TCP => counted.tcp[family] += 1,
                IPPROTO_UDP => counted.udp[family] += 1,
                IPPROTO_UDPLITE => counted.udp_lite[family] += 1,
                _ => {}
            }
            let is_connected = matches!(
                found.listed.state,
                ConnectionState::Established | ConnectionState::CloseWait
            );
            if common.protocol == IPPROTO_TCP && is_connected {
                counted.established += 1;
            }
        }
        counted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_as_many_values_as_names() {
        for counters in [IP, ICMP, TCP, UDP, UDP_LITE, TCP_EXTENSION, IP_EXTENSION] {
            let text = counters.lines(&[]);
            let mut lines = text.lines().map(|line| line.split(' ').collect::<Vec<_>>());
            let (names, values) = (lines.next().unwrap(), lines.next().unwrap());
            assert_eq!(names.len(), values.len(), "{text}");
            assert_eq!(names[0], values[0]);
            for (known, _) in counters.known {
                assert!(names.contains(known), "{known}");
            }
        }
        let text = TCP.lines(&[("CurrEstab", 7)]);
        assert!(text.contains("\nTcp: 1 200 120000 -1 0 0 0 0 7 0"), "{text}");
    }
}
