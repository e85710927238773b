"""Where sandboxes connect to, with E2B's SDK: two ports of the host, of which the function of the
template may reach the first."""

import sys

from e2b import Sandbox
from e2b.sandbox.network import ALL_TRAFFIC

ONE, OTHER = sys.argv[1:]
KNOCK = """python3 -c "
import errno, socket, sys
for port in sys.argv[1:]:
    s = socket.socket()
    code = s.connect_ex(('10.0.2.2', int(port)))
    if code: print(errno.errorcode[code]); continue
    s.sendall(b'hello'); print(s.recv(9).decode())
" """


def knock(sandbox, *ports):
    return " ".join(sandbox.commands.run(KNOCK + " ".join(ports)).stdout.split())


with Sandbox.create() as sandbox:
    print("default", knock(sandbox, ONE, OTHER))
with Sandbox.create("shut") as sandbox:
    print("shut", knock(sandbox, ONE))
with Sandbox.create(allow_internet_access=False) as sandbox:
    print("no internet", knock(sandbox, ONE))
with Sandbox.create(network={"deny_out": ["10.0.0.0/8"]}) as sandbox:
    print("denied", knock(sandbox, ONE), sandbox.get_info().network)
    sandbox.update_network(
        {"allow_out": ["host.thaw.internal"], "deny_out": lambda ctx: [ctx.all_traffic]}
    )
    print("exempt", knock(sandbox, ONE), sandbox.get_info().network)
    sandbox.update_network({"deny_out": [ALL_TRAFFIC]})
    print("updated", knock(sandbox, ONE))
    sandbox.update_network({})
    print("updated back", knock(sandbox, ONE))
    sandbox.update_network({"allow_internet_access": False})
    copy, = sandbox.fork()
    print("fork", knock(copy, ONE), copy.get_info().allow_internet_access)
    copy.kill()
    try:
        sandbox.update_network({"deny_out": ["example.com"]})
    except Exception as error:
        print("wrong", str(error).split(":")[0])
