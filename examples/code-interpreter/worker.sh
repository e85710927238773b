# Runs pieces of bash for worker.py, which describes requests and answers.
# Its own names begin with `_thaw`; nothing else is the code's.
# Descriptors that no program started by the code has.
exec 200<&"$1" 201>&"$2"
eval "exec $1<&- $2>&-"
set --

_thaw_answer() {
    builtin printf '%s\0' "$@" >&201
}

_thaw_read() {
    IFS= builtin read -r -d '' "$1" <&200
}

# Reads changes of variables into an array; a name that bash cannot have is left out.
_thaw_read_changes() {
    local -n changes=$1
    local count change
    changes=()
    _thaw_read count || return
    while ((count-- > 0)); do
        _thaw_read change
        if [[ ${change%%=*} =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]]; then changes+=("$change"); fi
    done
}

_thaw_change() {
    local change
    for change; do
        case $change in
        *=*) export "${change?}" ;;
        *) unset -v "$change" ;;
        esac
    done
}

# Changes that undo others, into an array.
_thaw_undo() {
    local -n undo=$1
    local change name
    shift
    undo=()
    for change; do
        name=${change%%=*}
        if [[ -v $name ]]; then undo+=("$name=${!name}"); else undo+=("$name"); fi
    done
}

# A copy of the sandbox draws other numbers.
_thaw_reseed() {
    local change
    for change; do
        if [[ $change == E2B_SANDBOX_ID=* ]]; then RANDOM=${SRANDOM:-$$}; fi
    done
}

# Has each function that runs leave before its next command. Those called later do not inherit it.
_thaw_unwind() {
    builtin trap '((${#FUNCNAME[@]} == 0)) || builtin return 130' DEBUG
}

_thaw_run() {
    builtin trap '_thaw_unwind; builtin return 130' INT
    eval "$_thaw_code"
}

# The code may have said `set -x`, which is not about what is done here.
_thaw_traced=
trap : INT
while _thaw_read _thaw_length && _thaw_read_changes _thaw_stay && _thaw_read_changes _thaw_lent && _thaw_read _thaw_code; do
    _thaw_change "${_thaw_stay[@]}"
    _thaw_reseed "${_thaw_stay[@]}"
    _thaw_undo _thaw_before "${_thaw_lent[@]}"
    _thaw_change "${_thaw_lent[@]}"
    _thaw_code=$_thaw_traced$_thaw_code
    _thaw_run 200<&- 201>&-
    {
        _thaw_status=$?
        builtin trap : INT
        case $- in *x*) _thaw_traced='builtin set -x; ' ;; *) _thaw_traced= ;; esac
        builtin set +x
        if ((_thaw_status == 130)); then builtin trap - DEBUG; fi
    } 2>/dev/null
    _thaw_change "${_thaw_before[@]}"
    if ((_thaw_status)); then
        _thaw_answer error ExitStatus "$_thaw_status" "the code has ended with status $_thaw_status"
    fi
    _thaw_answer 'done'
done
