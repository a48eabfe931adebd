#!/usr/bin/env bash
# Serves models on the GPUs of several hosts, over ssh, and keeps it running.
set -euo pipefail

usage() {
    cat <<'END'
Usage: launch/multinode.sh [OPTIONS] HOST... -- OPTIONS OF spmd-tx serve

The first HOST runs the server, with the first worker; the others run spmd-tx worker. Each HOST is what ssh
takes, and the others must reach the first one under that name. All need the same version of spmd-tx, the base
model under the same path, and one --data-dir that they share.

  --hosts GROUP=HOST,...  hosts of a group beside the first (docs/groups.md), which --group name=GROUP,... adds
                        behind --; can be repeated. main=HOST,... is the same as HOST... The workers of a group with
                        replicas join without numbers
  --gpus-per-node N     how many workers a host has with --process-per gpu (8)
  --process-per WHAT    one worker process per "node" or per "gpu" (node)
  --worker-port P       where workers reach the server (8470)
  --restart-after S     seconds until what was killed is started again (5)
  --directory DIR       where to start on each host (where ssh arrives)
  --help                show this

Workers of several hosts reach each other at ports of JAX and NCCL, which ask nobody who they are: keep others out
(docs/security.md). --jax-port of spmd-tx serve fixes the first of them for a firewall.

Without any --...-parallel-size, the server takes all GPUs, in the mesh that spmd-tx plan finds best for the model.
SPMD_TX names the program on the hosts, for instance SPMD_TX=/opt/spmd-tx/.venv/bin/spmd-tx.

A server or worker that is killed, or whose host or connection is lost, is started again. SIGTERM or Ctrl-C
lets the server finish its work (--drain-seconds); a second one ends everything at once. The exit code is the
server's. The secret that the hosts share is made for this run, and goes to them through ssh's standard input.

Example: launch/multinode.sh node-a node-b -- --base-model Qwen/Qwen3-32B --data-dir /shared/spmd-tx
Example: launch/multinode.sh --hosts main=node-a --hosts teacher=node-b,node-c -- --data-dir /shared/spmd-tx \
    --base-model Qwen/Qwen3-8B --group name=teacher,base_model=Qwen/Qwen3-32B,role=sample
END
}

refuse() {
    echo "multinode.sh: $1; see --help" >&2
    exit 2
}

# check_number OPTION VALUE LEAST MOST
check_number() {
    [[ $2 =~ ^[0-9]{1,9}$ ]] && ((10#$2 >= $3 && 10#$2 <= $4)) || refuse "$1 is '$2'; it must be a number from $3 to $4"
}

gpus=8 per=node port=8470 again=5 directory=. program=${SPMD_TX:-spmd-tx}
hosts=() groups=() hosts_of_groups=()
while (($#)); do
    [[ $1 == --*=* ]] && set -- "${1%%=*}" "${1#*=}" "${@:2}"
    case $1 in
        --hosts | --gpus-per-node | --process-per | --worker-port | --restart-after | --directory)
            [[ ${2:---} != -* ]] || refuse "$1 has no value" ;;&
        --hosts)
            [[ $2 =~ ^([a-z0-9][a-z0-9_-]*)=([^,]+(,[^,]+)*)$ ]] || refuse "--hosts is '$2'; write it as GROUP=HOST,HOST"
            if [[ ${BASH_REMATCH[1]} == main ]]; then
                IFS=, read -ra named <<<"${BASH_REMATCH[2]}"
                hosts+=("${named[@]}")
            else
                groups+=("${BASH_REMATCH[1]}") hosts_of_groups+=("${BASH_REMATCH[2]}")
            fi
            shift 2 ;;
        --gpus-per-node) check_number "$1" "$2" 1 1024; gpus=$2; shift 2 ;;
        --process-per) per=$2; shift 2 ;;
        --worker-port) check_number "$1" "$2" 1 65535; port=$2; shift 2 ;;
        --restart-after)
            [[ $2 =~ ^[0-9]{1,6}(\.[0-9]+)?$ ]] || refuse "$1 is '$2'; it must be a number of seconds"
            again=$2; shift 2 ;;
        --directory) directory=$2; shift 2 ;;
        --help | -h) usage; exit 0 ;;
        --) shift; break ;;
        -*) refuse "there is no option $1" ;;
        '') refuse "the name of a HOST is empty" ;;
        *) hosts+=("$1"); shift ;;
    esac
done
((${#hosts[@]})) || refuse "no HOST is named"
(($#)) || refuse "no options of spmd-tx serve stand behind HOST... --"
case $per in
    node) local_processes=1 ;;
    gpu) local_processes=$((10#$gpus)) ;;
    *) refuse "--process-per is '$per'; it must be node or gpu" ;;
esac

# Say of each group how many workers it has, and how many of them are on the first host: those have the lowest numbers.
remote=() # "GROUP PROCESS HOST" of the other workers of groups; "any" is the process of a replica
options=("$@")
for ((i = 0; i < ${#groups[@]}; i++)); do
    group=${groups[i]} here=0 elsewhere=() place=
    IFS=, read -ra named <<<"${hosts_of_groups[i]}"
    for host in "${named[@]}"; do
        if [[ $host == "${hosts[0]}" ]]; then here=$local_processes; else elsewhere+=("$host"); fi
    done
    for ((j = 0; j < ${#options[@]}; j++)); do
        [[ ,${options[j]#--group=}, == *,name=$group,* ]] && place=$j
    done
    [[ $place ]] || refuse "--hosts names group $group, and no --group name=$group,... stands behind --"
    if [[ ,${options[place]#--group=}, == *,replicas=* ]]; then
        for host in "${named[@]}"; do
            for ((j = 0; j < local_processes; j++)); do remote+=("$group any $host"); done
        done
        continue
    fi
    options[place]+=,num_processes=$((local_processes * ${#named[@]})),local_processes=$here
    for ((j = 0; j < local_processes * ${#elsewhere[@]}; j++)); do
        remote+=("$group $((here + j)) ${elsewhere[j / local_processes]}")
    done
done
set -- "${options[@]}"

# A server on all addresses of the first host, of both IPv4 and IPv6: a name may stand for either.
serve=("$program" serve "$@" --worker-host :: --worker-port "$port"
    --num-processes $((local_processes * ${#hosts[@]})) --local-processes "$local_processes")
secret=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
head=${hosts[0]##*@}
[[ $head == *:* && $head != \[* ]] && head="[$head]" # an IPv6 address
ssh_options=(-T -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 -o ServerAliveCountMax=3)
running=() # the keepers below, by process id
attempts=12 # to start it again that may fail at once, because what was there before is not gone yet

# A host that cannot be reached now is a mistake; one that is lost later is waited for.
all=("${hosts[@]}")
for each in "${remote[@]}"; do
    read -r _ _ host <<<"$each"
    [[ " ${all[*]} " == *" $host "* ]] || all+=("$host")
done
echo "multinode.sh: looking for ${all[*]}" >&2
looks=()
for host in "${all[@]}"; do
    ssh "${ssh_options[@]}" "$host" true </dev/null >/dev/null &
    looks+=($!)
done
for ((i = 0; i < ${#all[@]}; i++)); do
    code=0
    wait "${looks[i]}" || code=$?
    if ((code)); then
        echo "multinode.sh: ssh cannot run anything on ${all[i]} (code $code); check the name. This must work, and" \
            "ask for no password: ssh ${all[i]} true" >&2
        exit 2
    fi
done

# Runs on a host. The first line of its input is the secret, every other one a signal to end; so is the end of
# the input, which comes when this script or the connection is gone, however that happened.
there='
cd "$1" && shift || exit 2
IFS= read -r SPMD_TX_SECRET
export SPMD_TX_SECRET
exec 3<&0
"$@" 3<&- </dev/null &
child=$!
{
    while read -r _; do kill -TERM $child; done
    kill -TERM $child && sleep 1 && kill -TERM $child
} <&3 >/dev/null 2>&1 &
signals=$!
exec 3<&-
wait $child
code=$?
kill $signals 2>/dev/null
exit $code'

# on_host HOST COMMAND...: run it there until it ends. SIGTERM of this shell is passed on.
on_host() {
    local host=$1 input ssh code was_signal
    shift
    exec {input}> >(exec ssh "${ssh_options[@]}" "$host" \
        "bash -c $(printf %q "$there") spmd-tx $(printf '%q ' "$directory" "$@")")
    ssh=$!
    trap 'is_ending=yes was_signal=yes; echo end >&"$input" || true' TERM
    echo "$secret" >&"$input" || true
    while true; do
        was_signal= code=0
        wait $ssh || code=$?
        [[ $was_signal ]] || break
    done
    trap 'is_ending=yes' TERM
    exec {input}>&-
    return $code
}

# keep HOST COMMAND...: start it again when it was killed or cut off; what it decides itself holds.
keep() {
    local code failed=0
    is_ending=
    trap 'is_ending=yes' TERM
    trap '' PIPE INT
    while [[ ! $is_ending ]]; do
        code=0
        on_host "$@" || code=$?
        if ((code >= 128)); then
            failed=1
        elif ((code == 2 && failed && failed < attempts)); then
            failed=$((failed + 1))
        else
            exit $code
        fi
        [[ $is_ending ]] && break
        echo "multinode.sh: $3 on $1 ended with code $code; starting it again" >&2
        sleep $again
    done
    exit $code
}

end_all() {
    trap - EXIT
    kill -TERM "${running[@]}" 2>/dev/null || true
    sleep 0.2
    kill -TERM "${running[@]}" 2>/dev/null || true
    wait "${running[@]}" || true # but not for what waits for the end of this script
}
trap end_all EXIT

# Kills the keepers when this script is gone, however that happened: then nobody holds ssh's input open.
exec {life}> >(
    trap '' TERM INT HUP
    keepers=()
    while read -r keeper; do keepers+=("$keeper"); done
    kill -KILL "${keepers[@]}" 2>/dev/null
)

# start HOST COMMAND...: keep it, as $! in the background.
start() {
    keep "$@" {life}>&- &
    running+=($!)
    echo $! >&"$life"
}

start "${hosts[0]}" "${serve[@]}"
server=$!
for ((i = 1; i < ${#hosts[@]}; i++)); do
    for ((j = 0; j < local_processes; j++)); do
        process=$((i * local_processes + j))
        start "${hosts[i]}" "$program" worker --coordinator "$head:$port" --process-id $process
    done
done
for each in "${remote[@]}"; do
    read -r group process host <<<"$each"
    number=(--process-id "$process")
    [[ $process != any ]] || number=()
    start "$host" "$program" worker --coordinator "$head:$port" "${number[@]}" --group "$group"
done

signals=0
pass_on() {
    signals=$((signals + 1))
    kill -TERM $server 2>/dev/null || true
}
trap pass_on TERM INT

# Until the server ends, or a worker says that it is of no use here.
while true; do
    ended= code=0
    wait -n -p ended "${running[@]}" || code=$?
    [[ ${ended-} ]] || continue # a signal
    if [[ $ended == "$server" ]]; then
        exit $code
    elif ((code)); then
        echo "multinode.sh: a worker cannot take part; ending all" >&2
        exit $code
    fi
    remaining=()
    for each in "${running[@]}"; do
        [[ $each == "$ended" ]] || remaining+=("$each")
    done
    running=("${remaining[@]}")
done
