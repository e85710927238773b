# Makes a cluster, then becomes the server; both are over before the first client comes.
set -eu
PATH=$(ls -d /usr/lib/postgresql/*/bin):$PATH
mkdir -p /data && chown postgres /data
as="setpriv --reuid=postgres --regid=postgres --clear-groups"
$as initdb --pgdata=/data --auth=trust --no-sync --locale=C.UTF-8 >/dev/null
exec $as postgres -D /data -c listen_addresses=127.0.0.1 -c unix_socket_directories= -c fsync=off
