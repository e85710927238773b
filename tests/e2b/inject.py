"""Headers that the node adds to requests of sandboxes, with E2B's SDK: `rules` of `network`. The
host is a TLS server of the tests, which the function of the template may reach."""

import sys

from e2b import Sandbox

HOST, VALUE = sys.argv[1:]
ASK = f"""python3 -c "
import urllib.error, urllib.request
try: print(urllib.request.urlopen('https://{HOST}/', timeout=60).status)
except urllib.error.HTTPError as error: print(error.code)
except OSError: print('refused')
" """


def ask(sandbox):
    return sandbox.commands.run(ASK).stdout.strip()


def rules(value):
    return {HOST: [{"transform": {"headers": {"X-Key": value}}}]}


with Sandbox.create(network={"rules": rules(VALUE)}) as sandbox:
    print("added", ask(sandbox), list(sandbox.get_info().network["rules"].values()))
    copy, = sandbox.fork()
    print("fork", ask(copy))
    copy.kill()
    sandbox.update_network({"rules": rules("other")})
    print("updated", ask(sandbox))
    sandbox.update_network({"rules": rules(VALUE), "allow_internet_access": False})
    print("told", VALUE in str(sandbox.get_info()))
    print("denied", ask(sandbox))
    sandbox.update_network({})
    # It speaks to the server itself, whose authority it does not know.
    print("none", ask(sandbox))
for template, network in (("plain", rules(VALUE)), ("base", {"1.2.3.4": rules(VALUE)[HOST]})):
    try:
        Sandbox.create(template, network={"rules": network})
    except Exception as error:
        print(template, str(error).split(":")[0], "authority = true" in str(error))
