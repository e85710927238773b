# Makes a directory that is missing, with those above it, for a user, and prints its path.
path=$1 owner=$2
if [ ! -d "$path" ]; then
    first=$path
    while above=${first%/*} && [ -n "$above" ] && [ ! -d "$above" ]; do first=$above; done
    mkdir -p "$path" && { [ -z "$owner" ] || chown -R "$owner" "$first"; } || exit 1
fi
cd "$path" && pwd
