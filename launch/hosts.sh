#!/usr/bin/env bash
# Trains on a list of machines over ssh, with one torchrun on each:
#     PROCESSES=8 launch/hosts.sh node1,user@node2 pretrain.py experiment=sudoku_extreme run_name=two_machines
#     launch/hosts.sh --print node1,node2 pretrain.py ...      # without ssh: prints the commands for each machine
# All machines need the repository with its .venv at the same path, and a shared run folder. The first machine
# serves the rendezvous at PORT (default 29400). Ctrl-C, SIGTERM and SIGUSR1 save and end the run on all machines.
# If a machine fails, the others end too. Each machine has PROCESSES processes (default 1). Passes on OMP_NUM_THREADS,
# GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME.
set -u

usage() { sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 2; }
only_prints=no
[ "${1:-}" = --print ] && only_prints=yes && shift
[ $# -ge 2 ] || usage
IFS=, read -r -a hosts <<<"$1"
shift
for host in "${hosts[@]}"; do # other characters could form an option of ssh, or a command
    case $host in
    '' | -* | *@-* | *[!]A-Za-z0-9_.:@%[-]*) echo "error: ${host@Q} is not a host name or USER@HOST. Check the list of hosts." >&2 && exit 2 ;;
    esac
done
here=$(cd "$(dirname "$0")/.." && pwd)
head=${hosts[0]#*@} port=${PORT:-29400}
[[ $port =~ ^[1-9][0-9]{0,4}$ ]] && ((port < 65536)) ||
    { echo "error: PORT=$port is not an integer from 1 to 65535. Set another one." >&2 && exit 2; }
settings=(TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1)
for name in OMP_NUM_THREADS GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME; do
    [ -n "${!name:-}" ] && settings+=("$name=${!name}")
done
rendezvous=(--rdzv-backend c10d --rdzv-endpoint "$head:$port" --rdzv-id "$(date +%s)")
signals=(--signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGUSR1)
quote() { # prints the arguments, quoted for a shell
    for word; do
        case $word in
        '' | *[!A-Za-z0-9_./:=,@%+-]*) printf "'%s' " "${word//\'/\'\\\'\'}" ;;
        *) printf '%s ' "$word" ;;
        esac
    done
}
torchrun_on() { # sets `command` to the torchrun command line for a host
    command=(torchrun --nnodes ${#hosts[@]} --nproc-per-node "${PROCESSES:-1}" --local-addr "${1#*@}"
        "${rendezvous[@]}" "${signals[@]}" "${@:2}")
}

if [ $only_prints = yes ] || ! type ssh >/dev/null 2>&1; then
    for host in "${hosts[@]}"; do
        torchrun_on "$host" "$@"
        printf '# on %s:\n%s\n' "$host" "cd $(quote "$here")&& . .venv/bin/activate"
        printf '%s\n' "$(quote env "${settings[@]}" "${command[@]}")"
    done
    exit
fi

# Checks that the port is free on the first host, and that the others can resolve its name. torchrun would wait for minutes.
check='
import socket, sys
host, port, is_first = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "0"
try:
    if is_first:
        socket.create_server(("", port)).close()
    elif socket.gethostbyname(host).startswith("127."):
        raise OSError(0, "the name resolves to the local machine")
except OSError as error:
    remedy = "Set PORT to a free port" if is_first else "Pass a name of the first host that all hosts can resolve"
    reason = error.strerror.partition(" (")[0]
    sys.exit(f"error: cannot use {host}:{port} for the rendezvous: {reason}. {remedy}.")'

# ssh does not forward signals, so send them as lines of its input. When this script ends, its input ends, and the run too.
remote='
cd "$1" && . .venv/bin/activate && python -c "$2" "$3" "$4" "$5" || exit
shift 5
exec 3<&0
env "$@" </dev/null & child=$!
{ while read -r signal; do kill -s "$signal" $child; done; kill $child; } <&3 >/dev/null 2>&1 & listener=$!
wait $child
status=$?
kill $listener
exit $status'

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
pids=()
for i in "${!hosts[@]}"; do
    mkfifo "$folder/$i"
    eval "exec $((10 + i))<>'$folder/$i'" # open until this script ends
done
for i in "${!hosts[@]}"; do
    torchrun_on "${hosts[i]}" "$@"
    (
        trap '' INT TERM USR1 # the parent shell forwards these
        for j in "${!hosts[@]}"; do eval "exec $((10 + j))>&-"; done
        set -o pipefail
        ssh -o BatchMode=yes -o ConnectTimeout=10 -- "${hosts[i]}" \
            "$(quote bash -c "$remote" - "$here" "$check" "$head" "$port" "$i" "${settings[@]}" "${command[@]}")" <"$folder/$i" 2>&1 |
            sed -u -e 's/\r$//; s/.*\r//' -e "s/^/${hosts[i]#*@}: /"
    ) &
    pids+=($!)
done

asked=no
send() {
    asked=yes
    for i in "${running[@]}"; do echo "$1" >&$((10 + i)); done
}
trap 'send TERM' INT TERM
trap 'send USR1' USR1

status=0 running=("${!hosts[@]}")
while [ ${#running[@]} -gt 0 ]; do
    sleep 0.2
    still=()
    for i in "${running[@]}"; do
        kill -0 "${pids[i]}" 2>/dev/null && still+=("$i") && continue
        wait "${pids[i]}"
        ended=$?
        echo "${hosts[i]#*@}: ended with status $ended"
        [ $status = 0 ] && status=$ended
    done
    running=(${still[@]+"${still[@]}"})
    if [ $status != 0 ] && [ $asked = no ] && [ ${#running[@]} -gt 0 ]; then send TERM; fi
done
exit $status
