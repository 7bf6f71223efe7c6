#!/usr/bin/env bash
# The same run on a Ray cluster. On one host:
#
#   launch/cluster.sh up                                 start a Ray head here (again: nothing happens)
#   launch/cluster.sh run CONFIG.toml [--key.sub VALUE]  train on it
#   launch/cluster.sh status                             what the cluster has and what is used
#   launch/cluster.sh down                               end the head that `up` started, and nothing else
#
# Environment: LEEWAY_RAY_PORT (6379), LEEWAY_RAY_HOST (127.0.0.1), LEEWAY_STATE (~/.cache/leeway).
# Ray's token authentication stays on; the token is the one in ~/.ray/auth_token.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
bin="$root/.venv/bin"
port=${LEEWAY_RAY_PORT:-6379}
host=${LEEWAY_RAY_HOST:-127.0.0.1}
state=${LEEWAY_STATE:-$HOME/.cache/leeway}
address="$host:$port"
session="$state/ray-$port" # holds the Ray session's files, so that `down` can name its own processes
export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0

fail() {
  printf 'cluster.sh: %s\n' "$1" >&2
  exit "${2:-1}"
}

usage() {
  sed -n '2,10s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
  exit 2
}

is_up() { timeout 20 "$bin/ray" status --address "$address" >/dev/null 2>&1; }

# Processes of our own session: Ray names its session folder on every command line.
own_processes() { pgrep -f -- "$session/" || true; }

up() {
  if is_up; then
    echo "Ray is up at $address"
    return
  fi
  [ -z "$(own_processes)" ] || fail "a Ray head of $session is there but does not answer at $address; run down first"
  mkdir -p "$session"
  chmod 700 "$state" "$session"
  "$bin/ray" get-auth-token --generate >/dev/null 2>&1 || true
  if ! "$bin/ray" start --head --node-ip-address "$host" --port "$port" --include-dashboard false \
    --object-store-memory 80000000 --temp-dir "$session" >"$session/start.log" 2>&1; then
    fail "Ray did not start at $address (is the port taken?); see $session/start.log"
  fi
  echo "Ray is up at $address"
}

run() {
  [ $# -ge 1 ] || usage
  is_up || fail "no Ray answers at $address; run '$0 up' first"
  exec "$bin/leeway" train "$@" --launch.ray_address "$address"
}

status() {
  is_up || fail "no Ray answers at $address"
  "$bin/ray" status --address "$address"
}

down() {
  local processes
  processes=$(own_processes)
  if [ -z "$processes" ]; then
    echo "No Ray head of ours is running"
  else
    # shellcheck disable=SC2086 # one argument per process
    kill $processes 2>/dev/null || true
    for _ in $(seq 50); do
      processes=$(own_processes)
      [ -n "$processes" ] || break
      sleep 0.2
    done
    # shellcheck disable=SC2086
    [ -z "$processes" ] || kill -9 $processes 2>/dev/null || true
    echo "Ray at $address is down"
  fi
  rm -rf "$session"
}

[ -x "$bin/ray" ] || fail "nothing is installed in $root/.venv; run 'make install' first"
[ $# -ge 1 ] || usage
verb=$1
shift
case $verb in
up | run | status | down) "$verb" "$@" ;;
*) usage ;;
esac
