#!/usr/bin/env bash
# Serves a model on all GPUs of this machine: launch/single_node.sh MODEL [more options of spmd-tx serve]
# It listens on loopback only; --host changes that, and takes API keys (docs/keys.md).
# A server that is killed is started again after RESTART_AFTER seconds (5). SIGTERM or Ctrl-C lets it finish its work
# (--drain-seconds), and a second one ends it at once.
set -uo pipefail

if (($# == 0)) || [[ $1 == -* ]]; then
    echo "Usage: launch/single_node.sh MODEL [OPTIONS OF spmd-tx serve]" >&2
    exit 2
fi
again=${RESTART_AFTER:-5}
if [[ ! $again =~ ^[0-9]{1,6}(\.[0-9]+)?$ ]]; then
    echo "single_node.sh: RESTART_AFTER is '$again'; it must be a number of seconds" >&2
    exit 2
fi

is_ending= server=
pass_on() {
    is_ending=yes was_signal=yes
    kill -TERM $server 2>/dev/null
}
trap pass_on TERM INT HUP
# Ends the server when this script is gone, however that happened.
exec {life}> >(
    trap '' TERM INT HUP
    while read -r line; do server=$line; done
    [[ $server ]] && kill -TERM $server 2>/dev/null && sleep 1 && kill -TERM $server 2>/dev/null
)
set -m # the server has a process group of its own: a Ctrl-C reaches it through this script, once

while true; do
    spmd-tx serve --base-model "$1" "${@:2}" {life}>&- &
    server=$!
    echo $server >&"$life"
    was_signal=yes
    while [[ $was_signal ]]; do
        was_signal= code=0
        wait $server || code=$?
    done
    echo >&"$life"
    if ((code < 128)) || [[ $is_ending ]]; then
        exit $code
    fi
    echo "single_node.sh: the server ended with code $code; starting it again" >&2
    sleep "$again"
    [[ $is_ending ]] && exit $code
done
