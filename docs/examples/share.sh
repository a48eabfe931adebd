#!/bin/sh
# Two tenants share a server, and neither sees what the other has: share.sh URL BASE_MODEL DATA_DIR
# Run it where the server's data is, with spmd-tx, tinker and python on the PATH.
set -eu
export TINKER_BASE_URL="$1" TINKER_TELEMETRY=0
model="$2" data="$3" here="$(dirname "$0")"

# When its work is done, threads of the SDK's transport may abort the interpreter (134).
as() { TINKER_API_KEY="$1"; export TINKER_API_KEY; shift; "$@" || [ $? -eq 134 ]; }

echo "keys for Alice, with limits, and for Bob:"
alice=$(spmd-tx keys create --owner alice --adapters 2 --requests-per-second 100 --data-dir "$data")
bob=$(spmd-tx keys create --owner bob --expires-days 30 --data-dir "$data")

echo "Alice trains and saves:"
as "$alice" python "$here/train.py" --base-url "$1" --base-model "$model" --epochs 1

echo "Alice's checkpoints:"
as "$alice" tinker checkpoint list
echo "Bob's checkpoints:"
as "$bob" tinker checkpoint list

echo "Alice's key is replaced; the old one is valid for another hour:"
first_of_alice='import json, sys; print(next(key["id"] for key in json.load(sys.stdin) if key["owner"] == "alice"))'
id=$(spmd-tx keys list --json --data-dir "$data" | python -c "$first_of_alice")
renewed=$(spmd-tx keys rotate "$id" --overlap-hours 1 --data-dir "$data")
sleep 3  # within two seconds a running server has noticed
as "$renewed" tinker run list
