# Moves what was unpacked to where it belongs: a file or link to the path itself, or into it if a
# slash ends it; the contents of a directory into the directory, where files and links are replaced
# and directories stay as they are.
from=$1 target=$2 owner=$3 mode=$4
shopt -s dotglob nullglob
merge() {
    local entry moved=()
    for entry in "$1"/*; do
        if [ -d "$entry" ] && [ ! -L "$entry" ] && [ -d "$2/${entry##*/}" ]; then
            merge "$entry" "$2/${entry##*/}" || return
        else
            moved+=("$entry")
        fi
        if [ ${#moved[@]} -ge 100 ]; then
            mv -f "${moved[@]}" "$2/" || return
            moved=()
        fi
    done
    [ ${#moved[@]} -eq 0 ] || mv -f "${moved[@]}" "$2/"
}
if [ -L "$from" ] || [ -f "$from" ]; then
    [ -z "$owner" ] || chown -h "$owner" "$from" || exit
    [ -z "$mode" ] || [ -L "$from" ] || chmod "$mode" "$from" || exit
    case $target in
    */) mkdir -p "$target" ;;
    *) mkdir -p "${target%/*}/" ;;
    esac || exit
    exec mv -f "$from" "$target"
fi
[ -d "$from" ] || { echo "the uploaded files have no such path" >&2; exit 1; }
[ -z "$owner" ] || chown -R "$owner" "$from" || exit
[ -z "$mode" ] || chmod -R "$mode" "$from" || exit
target=${target%/}/
[ -d "$target" ] || { mkdir -p "$target" && { [ -z "$owner" ] || chown "$owner" "$target"; } } || exit
merge "$from" "${target%/}"
