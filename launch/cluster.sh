#!/usr/bin/env bash
# Run training on a Ray cluster of one or more hosts; see docs/cluster.md.
#
#   launch/cluster.sh up [HOSTS]                         start Ray on every host where it is not up yet
#   launch/cluster.sh run CONFIG.toml [--key.sub VALUE]  train on the cluster
#   launch/cluster.sh resume RUN [--key.sub VALUE]       resume a run, which may be from an earlier cluster
#   launch/cluster.sh status                             show hosts and resource usage; exit status 1 if a host is lost
#   launch/cluster.sh down                               end the runs with a checkpoint, then end the processes that
#                                                        `up` started on every host, and no other processes
#
# HOSTS, --hosts FILE or $LEEWAY_HOSTS names a file with one line per host, `HOST [POOL[,POOL...] [ADDRESS]]`, the head
# first. Later calls use the same file until `down`. Without a file, the cluster is this machine, with Ray on loopback.
# Environment variables, with their defaults in parentheses:
#   LEEWAY_SSH            remote shell, called as $LEEWAY_SSH HOST COMMAND (ssh with BatchMode, timeout and keep-alive)
#   LEEWAY_DIR, LEEWAY_CPUS   checkout on every host (the path of this checkout), CPUs per host (as Ray detects them)
#   LEEWAY_RAY_PORT, LEEWAY_WORKER_PORTS   port of Ray on the head (6379), and ports of Ray's workers (20002-20999)
#   LEEWAY_STATE          your folder on a local disk (~/.cache/leeway on this machine, /tmp/leeway-UID on the hosts)
#   LEEWAY_LIMIT_S, LEEWAY_END_S   seconds: timeout of each command on a host (60), and of `down` for runs to end (720)
#   RAY_AUTH_TOKEN_PATH   Ray's token, which is always required (~/.ray/auth_token)
#   LEEWAY_SHARE_HOSTS    1 allows `up` on hosts where another Ray runs
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/cluster_lib.sh
source "$here/launch/cluster_lib.sh"

up() {
  [ $# -le 1 ] || usage
  local i missing=() stale=()
  hosts_file=${1:-$hosts_file}
  load_hosts
  make_token
  each_host "facts ${addresses[0]}" "${!hosts[@]}"
  check_facts
  query_head_if_up
  check_head
  end_removed_hosts
  for i in "${!hosts[@]}"; do
    if ! is_as_configured "$i"; then
      missing+=("$i")
      [ -z "${raylets[$i]}" ] || stale+=("$i")
    fi
  done
  save_hosts
  [ ${#stale[@]} -eq 0 ] || each_host stop "${stale[@]}"
  [ ${#missing[@]} -eq 0 ] || start "${missing[@]}"
  nodes=$(on_head nodes) || fail "$nodes"
  for i in "${!hosts[@]}"; do
    is_in_cluster "$i" || fail "$(label "$i") has started Ray but is not in the cluster; see $log on that host"
    print_host "$i" "up$(in_array "$i" "${missing[@]}" || echo ' already')${pools[$i]:+, in ${pools[$i]}}"
  done
  echo "Ray is up at ${addresses[0]}:$port"
}

# Start Ray on these hosts, the head first. If Ray fails on one host, stop Ray on all of these hosts again.
start() {
  local failed=0
  if [ "$1" = 0 ]; then
    start_together 0 || failed=1
    [ $# -eq 1 ] || [ "$failed" = 1 ] || start_together "${@:2}" || failed=1
  else
    start_together "$@" || failed=1
  fi
  [ "$failed" = 1 ] || return 0
  each_host stop "$@"
  [ "$1" != 0 ] || delete_saved_hosts
  fail "Ray was stopped again on the hosts of this call; fix the error above and repeat the call"
}

start_together() {
  local i failed=0
  stdin=$token_file limit_s=120 each_host "start ${addresses[0]}" "$@"
  for i in "$@"; do
    [ "${codes[$i]}" = 0 ] || { failed=1 && report_failure "$i"; }
  done
  return "$failed"
}

run() {
  [ $# -ge 1 ] || usage
  leeway train "$(path_on_head "$1")" "${@:2}"
}

resume() {
  [ $# -ge 1 ] || usage
  local config
  config=$(path_on_head "$1/config.toml")
  leeway resume "${config%/config.toml}" "${@:2}"
}

# Run `leeway ...` on the head until the command ends.
leeway() {
  local command child code id
  id=$(uname -n).$$
  load_hosts
  nodes=$(on_head nodes) || fail "$nodes; run '$0 up' first"
  command=$(command_of 0 run "$id" "$@")
  if is_here 0; then
    rm -rf "$work"
    exec bash -c "$command"
  fi
  # With a terminal, ssh -t makes the live view and Ctrl-C work. Without a terminal, the trap below forwards signals.
  if [ -z "${LEEWAY_SSH:-}" ] && [ -t 0 ] && [ -t 1 ]; then ssh+=(-t); fi
  (trap '' USR1 USR2 && exec "${ssh[@]}" "${hosts[0]}" "$command") <&0 &
  child=$!
  # shellcheck disable=SC2064 # expand the id now
  trap "on_head interrupt $(printf %q "$id") >/dev/null || true" INT TERM USR1 USR2
  while :; do  # a signal ends `wait`, but not the command
    code=0
    wait "$child" || code=$?
    kill -0 "$child" 2>/dev/null || break
  done
  [ "$code" != 255 ] || fail "lost the connection to $(label 0); the run may still be active on that host: check its folder"
  exit "$code"
}

status() {
  [ $# -eq 0 ] || usage
  local i lost=0
  load_hosts
  nodes=$(on_head nodes) || fail "$nodes"
  for i in "${!hosts[@]}"; do
    if is_in_cluster "$i"; then
      print_host "$i" "up, $(node_word "$i" 3) CPUs, $(node_word "$i" 4) GPUs${pools[$i]:+, in ${pools[$i]}}"
    else
      lost=1
      print_host "$i" "lost: its Ray is not in the cluster; run '$0 up' to let it join again"
    fi
  done
  on_head ray-status
  exit "$lost"
}

down() {
  [ $# -eq 0 ] || usage
  local i line failed=0
  load_hosts
  # the runs end before Ray stops, so that they can finish their step; if the head is unreachable, `stop` below reports the error
  limit_s=$((end_s + 30)) on_host 0 end-runs "$end_s" </dev/null 2>/dev/null |
    while IFS= read -r line; do print_host 0 "$line"; done || true
  each_host stop "${!hosts[@]}"
  for i in "${!hosts[@]}"; do
    if [ "${codes[$i]}" = 0 ]; then print_host "$i" "down"; else failed=1 && report_failure "$i"; fi
  done
  delete_saved_hosts
  [ "$failed" = 0 ] || fail "Ray may still run on the hosts above; run '$0 --hosts FILE down' again when they can be reached"
}

verb=
while [ $# -gt 0 ]; do
  case $1 in
  --hosts)
    [ $# -ge 2 ] || usage
    hosts_file=$2
    shift 2
    ;;
  up | run | resume | status | down)
    [ -z "$verb" ] || break
    verb=$1
    shift
    ;;
  *) break ;;
  esac
done
[ -n "$verb" ] || usage
"$verb" "$@"
