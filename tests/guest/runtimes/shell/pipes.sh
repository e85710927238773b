# Pipes, redirections, substitutions, traps.
set -u
cd "$(mktemp -d)"
seq 1 1000 | grep 7 | sort -rn | head -n 3 | tr '\n' ' '; echo
echo "sum $(seq 1 100 | paste -sd+ | bc) $(seq 1 100 | awk '{ s += $1 } END { print s }')"
printf 'b\na\nc\n' > data; sort < data > sorted 2>&1; cat sorted
cat <<END | sed 's/here/HERE/'
a document from here, $((6 * 7)), ${HOME:+home}
END
diff <(sort data) <(printf 'a\nb\nd\n') | tail -n 2
exec 5> five; echo "to five" >&5; exec 5>&-; cat five
(exit 3); echo "subshell $?"
false | true; echo "pipe ${PIPESTATUS[*]}"
set -o pipefail; false | true; echo "pipefail $?"; set +o pipefail
yes | head -n 2; echo "yes ${PIPESTATUS[0]}"
array=(one "two words" three); printf '<%s>' "${array[@]}"; echo " ${#array[@]}"
declare -A map=([a]=1 [b]=2); echo $((map[a] + map[b]))
[[ "thaw 2024" =~ ([a-z]+)\ ([0-9]+) ]] && echo "${BASH_REMATCH[2]}-${BASH_REMATCH[1]}"
while read -r line; do echo "read: $line"; done < <(printf '1\n2\n')
coproc cat; echo "to the other" >&"${COPROC[1]}"; read -r line <&"${COPROC[0]}"; echo "back: $line"
eval "exec ${COPROC[1]}>&-"; wait
mkfifo fifo; (echo through the fifo > fifo &); cat fifo
find . -type f | sort | xargs -n 2 echo
find . -name 'f*' -exec basename {} \; | sort
trap 'echo "caught USR1"' USR1; kill -USR1 $$
trap 'echo leaving' EXIT
timeout 0.1 sleep 10; echo "timeout $?"
{ sh -c 'kill -9 $$'; } 2>/dev/null; echo "killed $?"
env -i A=b sh -c 'echo "$A $#" "$@"' name x y
echo $(( $(cat /proc/self/stat | cut -d' ' -f4) == $$ ))
exit 4
