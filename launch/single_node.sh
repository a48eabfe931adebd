#!/usr/bin/env bash
# Serves a model on all GPUs of this machine: launch/single_node.sh MODEL [more options of spmd-tx serve]
# It listens on loopback only; --host changes that, and takes API keys (docs/keys.md).
set -euo pipefail
exec spmd-tx serve --base-model "$1" "${@:2}"
