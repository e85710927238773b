#!/bin/sh
# Makes a network of two hosts, in network namespaces that end with this script, and
# runs a command on the first: `unshare --net network.sh PORT COMMAND...`, as root.
#
#   first    10.213.0.1                    runs the command
#   second   10.213.0.2 198.51.100.2 168.63.129.16 100.100.100.200 fd00:213::2
#            accepts TCP connections on PORT at all of them
set -e
port=$1
shift
ip link set lo up
unshare --net sleep 600 >/dev/null 2>&1 </dev/null &
second=$!
server=
trap 'kill $second $server 2>/dev/null' EXIT
ip link add first type veth peer name second
on_second() { nsenter --target "$second" --net "$@"; }
# Until it has a network namespace of its own, the other end stays here.
while [ "$(readlink /proc/$second/ns/net)" = "$(readlink /proc/self/ns/net)" ]; do sleep 0.01; done
ip link set second netns "$second"
on_second ip link set lo up
for address in 10.213.0.2/24 198.51.100.2/32 168.63.129.16/32 100.100.100.200/32; do
    on_second ip address add "$address" dev second
done
on_second ip -6 address add fd00:213::2/64 dev second nodad
on_second ip link set second up
ip address add 10.213.0.1/24 dev first
ip -6 address add fd00:213::1/64 dev first nodad
ip link set first up
ip route add default via 10.213.0.2
ip -6 route add default via fd00:213::2
# Not through the function above: its process would be a shell's, which outlives it.
nsenter --target "$second" --net python3 -c '
import socket, sys
s = socket.create_server(("::", int(sys.argv[1])), family=socket.AF_INET6, dualstack_ipv6=True)
while True:
    s.accept()
' "$port" >/dev/null 2>&1 </dev/null &
server=$!
for attempt in $(seq 1 200); do
    python3 -c 'import socket, sys; socket.create_connection(("10.213.0.2", int(sys.argv[1])), 1)' \
        "$port" 2>/dev/null && break
    sleep 0.05
done
"$@"
