# shellcheck shell=bash disable=SC2034 # sourced by launch/cluster.sh, which reads what is set here
# The parts of launch/cluster.sh: the host file, commands on hosts, and the checks of what they answer.

# Said before anything needs them: macOS, for one, has bash 3.2 and none of these.
lacking=()
((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 404)) || lacking+=("bash 4.4 (this is $BASH_VERSION)")
for tool in timeout getent realpath; do
  command -v "$tool" >/dev/null || lacking+=("$tool")
done
if [ "${#lacking[@]}" -gt 0 ]; then
  (IFS=, && printf 'cluster.sh: this machine lacks %s; call it from Linux, such as the head\n' "${lacking[*]}" >&2)
  exit 2
fi

dir=${LEEWAY_DIR:-$here}
port=${LEEWAY_RAY_PORT:-6379}
state=${LEEWAY_STATE:-$HOME/.cache/leeway}
memory="$state/hosts-$port" # the hosts of the last `up`, as a host file
log="${LEEWAY_STATE:-/tmp/leeway-UID}/ray-$port/start.log"
hosts_file=${LEEWAY_HOSTS:-}
# A connection is given up when nothing has come for 120 s: `run` would else wait on a head that is gone for ever.
keepalive="-o ServerAliveInterval=15 -o ServerAliveCountMax=8"
read -ra ssh <<<"${LEEWAY_SSH:-ssh -o BatchMode=yes -o ConnectTimeout=10 $keepalive}"
token_file=${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}
max_clocks_apart_s=5
end_s=${LEEWAY_END_S:-720} # a run has 600 s for its step, then exports, and has 60 s for its report

hosts=() pools=() addresses=() # by line of the host file
codes=() answers=() errors=()  # of each host's last command: exit status, what it wrote, the last line of its errors
asked_s=()                     # when it was asked, by our clock
raylets=()                     # of each host: the process of our raylet, where one runs
nodes=                         # what the head says of its hosts: ADDRESS up|lost CPUS GPUS POOLS

fail() {
  printf 'cluster.sh: %s\n' "$1" >&2
  exit "${2:-1}"
}

usage() {
  sed -n '2,/^set /s/^# \{0,1\}//p' "$here/launch/cluster.sh" >&2
  exit 2
}

say() { printf '%s: %s\n' "${hosts[$1]}" "$2"; }

problem() { printf 'cluster.sh: %s: %s\n' "$(named "$1")" "$2" >&2; }

named() {
  if [ "${hosts[$1]}" = "${addresses[$1]}" ]; then echo "${hosts[$1]}"; else echo "${hosts[$1]} (${addresses[$1]})"; fi
}

in_array() {
  local wanted=$1 each
  shift
  for each in "$@"; do [ "$each" != "$wanted" ] || return 0; done
  return 1
}

# --- the host file ----------------------------------------------------------------------------------

read_hosts() {
  local line number=0 clean
  # comments, a byte order mark, spaces that do not break, line ends of Windows and of old Macs
  clean=(-e $'1s/^\xef\xbb\xbf//' -e $'s/\xc2\xa0/ /g' -e 's/\r$//' -e 's/\r/\n/g' -e 's/#[^\n]*//g')
  if [ -z "$hosts_file" ]; then
    hosts=(localhost) pools=("") addresses=("${LEEWAY_RAY_HOST:-127.0.0.1}")
    return
  fi
  { [ -f "$hosts_file" ] && [ -r "$hosts_file" ]; } ||
    fail "the host file $hosts_file cannot be read; examples/hosts.txt shows one" 2
  [ "$(tr -dc '\000' <"$hosts_file" | wc -c)" -eq 0 ] ||
    fail "the host file $hosts_file is not UTF-8 text (UTF-16?); save it as UTF-8" 2
  while IFS= read -r line || [ -n "$line" ]; do
    number=$((number + 1))
    read_host "$hosts_file:$number" "$line"
  done < <(LC_ALL=C sed "${clean[@]}" "$hosts_file")
  [ ${#hosts[@]} -gt 0 ] || fail "the host file $hosts_file names no host; examples/hosts.txt shows one" 2
  check_addresses
}

read_host() {
  local where=$1 name pool address rest
  read -r name pool address rest <<<"$2" || true
  [ -n "$name" ] || return 0
  [ -z "$rest" ] || fail "$where: '$rest' is too much; a line is HOST [POOL[,POOL...] [ADDRESS]]" 2
  [[ $name != -* ]] || fail "$where: '$name' is not a host" 2
  [ "$pool" != - ] || pool=
  [[ $pool =~ ^([A-Za-z0-9_-]+(,[A-Za-z0-9_-]+)*)?$ ]] ||
    fail "$where: '$pool' is not a list of pools; it is written a,b without spaces" 2
  ! in_array "$name" "${hosts[@]}" || fail "$where: $name is there twice; give all its pools in one line" 2
  hosts+=("$name") pools+=("$pool") addresses+=("${address:-$(address_of "$name")}")
}

# The IPv4 address of a host as this machine sees it; empty where it sees none.
address_of() {
  local name=${1#*@}
  if [[ $name =~ ^[0-9]+(\.[0-9]+){3}$ ]]; then
    echo "$name"
  else
    getent ahostsv4 "$name" | awk 'NR == 1 {print $1}' || true
  fi
}

check_addresses() {
  local i advice="give its private address as the third word of its line in $hosts_file"
  for i in "${!hosts[@]}"; do
    [ -n "${addresses[$i]}" ] || fail "the address of ${hosts[$i]} is not known here; $advice" 2
    [[ ${addresses[$i]} != *:* ]] || fail "${addresses[$i]} is an IPv6 address, and a cluster needs IPv4; $advice" 2
    [ ${#hosts[@]} -eq 1 ] || [[ ${addresses[$i]} != 127.* ]] ||
      fail "the address of ${hosts[$i]} is ${addresses[$i]} here, where no other host reaches it; $advice" 2
  done
}

remember_hosts() {
  local i
  mkdir -p "$state" 2>/dev/null || true
  { [ -d "$state" ] && [ -O "$state" ]; } || fail "$state is not a folder of yours; set LEEWAY_STATE to one" 2
  chmod 700 "$state"
  for i in "${!hosts[@]}"; do echo "${hosts[$i]} ${pools[$i]:--} ${addresses[$i]}"; done >"$memory"
}

# The hosts of the last `up`, where no file is given.
recall_hosts() {
  if [ -z "$hosts_file" ] && [ -s "$memory" ] && [ -O "$memory" ]; then hosts_file=$memory; fi
  read_hosts
}

forget_hosts() {
  rm -f "$memory"
  [ ! -d "$state" ] || rmdir --ignore-fail-on-non-empty "$state"
}

# --- commands on hosts ------------------------------------------------------------------------------

is_here() { [ "${hosts[$1]}" = localhost ]; }

# A file of this machine as the head names it: what is in this checkout is in the one there.
there() {
  local path=$1 root
  [ ! -f "$path" ] || path=$(realpath "$path")
  root=$(realpath "$here")
  [[ $path != "$root"/* ]] || path=$dir/${path#"$root"/}
  echo "$path"
}

# The shell command that calls a host's script there.
command_of() {
  local i=$1 name words
  words=(env "LEEWAY_ADDRESS=${addresses[$i]}" "LEEWAY_POOLS=${pools[$i]}" "LEEWAY_RAY_PORT=$port")
  for name in LEEWAY_STATE LEEWAY_WORKER_PORTS LEEWAY_CPUS; do
    [ -z "${!name:-}" ] || words+=("$name=${!name}")
  done
  printf '%q ' "${words[@]}" "$dir/launch/cluster_host.sh" "${@:2}"
}

# Call a host's script, no longer than $limit_s. Every command on a host goes this way, but for the long one of a run.
on_host() {
  local i=$1 reach=(bash -c)
  is_here "$i" || reach=("${ssh[@]}" "${hosts[$i]}")
  timeout -k 5 "${limit_s:-${LEEWAY_LIMIT_S:-60}}" "${reach[@]}" "$(command_of "$@")"
}

# Call the head's script; what it prints, or why it failed.
on_head() {
  local code=0
  on_host 0 "$@" </dev/null 2>"$work/head" || code=$?
  [ "$code" = 0 ] || why 0 "$code" "$(tail -n 1 "$work/head")"
  return "$code"
}

# Call a verb on these hosts at the same time, each with $stdin; fills codes, answers and errors.
each_host() {
  local i words children=()
  read -ra words <<<"$1"
  shift
  for i in "$@"; do
    asked_s[i]=$(date +%s)
    {
      on_host "$i" "${words[@]}" <"${stdin:-/dev/null}" >"$work/$i.out" 2>"$work/$i.err" || exit $?
      date +%s >"$work/$i.at"
    } &
    children[i]=$!
  done
  for i in "$@"; do
    codes[i]=0
    wait "${children[$i]}" || codes[i]=$?
    answers[i]=$(cat "$work/$i.out")
    errors[i]=$(tail -n 1 "$work/$i.err")
  done
}

# Why a command on a host failed, and what to try.
why() {
  local i=$1 code=$2 error=$3
  case $code in
  124 | 137) echo "$(named "$i") gave no answer in ${limit_s:-${LEEWAY_LIMIT_S:-60}} s (LEEWAY_LIMIT_S); is it up?" ;;
  126 | 127) echo "$(named "$i") has no Leeway in $dir; put the same checkout there, or set LEEWAY_DIR" ;;
  255) echo "$(named "$i") cannot be reached: ${error:-ssh says nothing}; try '${ssh[*]} ${hosts[$i]} true'" ;;
  *) echo "$(named "$i"): ${error:-its command failed with $code}" ;;
  esac
}

complain() { printf 'cluster.sh: %s\n' "$(why "$1" "${codes[$1]}" "${errors[$1]}")" >&2; }

make_token() {
  [ ! -s "$token_file" ] || return 0
  (umask 077 && mkdir -p "$(dirname "$token_file")" && od -An -vtx1 -N32 /dev/urandom | tr -d ' \n' >"$token_file")
}

# --- checks before anything is started --------------------------------------------------------------

fact() { awk -v key="$2" '$1 == key {sub("^" key " ", ""); print}' <<<"${answers[$1]}"; }

check_facts() {
  local i failed=0
  for i in "${!hosts[@]}"; do
    if [ "${codes[$i]}" != 0 ]; then
      failed=1
      complain "$i"
    else
      raylets[i]=$(fact "$i" raylet)
      check_versions "$i" || failed=1
      check_neighbours "$i" || failed=1
      check_clock "$i"
    fi
  done
  [ "$failed" = 0 ] || exit 1
}

check_versions() {
  local key
  [ "${codes[0]}" = 0 ] || return 0
  for key in python ray leeway; do
    [ "$(fact "$1" "$key")" = "$(fact 0 "$key")" ] || {
      problem "$1" "has $key $(fact "$1" "$key"), and the head $(fact 0 "$key"); install the same on both"
      return 1
    }
  done
}

# What else runs there, and is left alone.
check_neighbours() {
  local number who
  while read -r number who; do
    [ -z "$number" ] || {
      problem "$1" "port $number is taken by $who; end that, or set LEEWAY_RAY_PORT"
      return 1
    }
  done < <(fact "$1" taken)
  while read -r number who; do
    [ -z "$number" ] || [ -n "${LEEWAY_SHARE_HOSTS:-}" ] || {
      problem "$1" "another Ray is running (process $number, session $who); end it, or set LEEWAY_SHARE_HOSTS=1"
      return 1
    }
  done < <(fact "$1" other)
}

# It was asked for its time between two moments of our clock; of other hosts the answers may have come much later.
check_clock() {
  local apart=0 there
  there=$(fact "$1" time)
  [ "$there" -ge "${asked_s[$1]}" ] || apart=$((there - asked_s[$1]))
  [ "$there" -le "$(cat "$work/$1.at")" ] || apart=$((there - $(cat "$work/$1.at")))
  [ "${apart#-}" -le "$max_clocks_apart_s" ] ||
    problem "$1" "warning: its clock is ${apart#-} s $([ "$apart" -lt 0 ] && echo behind || echo ahead); let NTP set it"
}

# --- the head's view --------------------------------------------------------------------------------

ask_head_if_there() {
  [ -n "${raylets[0]}" ] || return 0
  nodes=$(on_head nodes) || fail "$nodes; run '$0 down' first"
}

# To start the head anew ends the whole cluster, with every run on it.
check_head() {
  if [ -z "${raylets[0]}" ] || is_as_wanted 0; then
    return 0
  elif is_in_cluster 0; then
    fail "the pools of the head changed from '$(node_word 0 5)' to '${pools[0]}'; run '$0 down' first"
  fi
  fail "the head's own Ray is lost to it; run '$0 down' first"
}

# A word of the head's line of a host.
node_word() { awk -v at="${addresses[$1]}" -v word="$2" '$1 == at {print $word}' <<<"$nodes"; }

is_in_cluster() { [ "$(node_word "$1" 2)" = up ]; }

is_as_wanted() {
  [ -n "${raylets[$1]}" ] && is_in_cluster "$1" &&
    [ "$(node_word "$1" 5)" = "$(tr , '\n' <<<"${pools[$1]}" | LC_ALL=C sort -u | paste -sd ,)" ]
}

# End the hosts of the last `up` that the file has no more.
end_removed_hosts() {
  local name pool address i failed=0 num=${#hosts[@]} advice="or take it out of $memory where it is gone for good"
  [ -s "$memory" ] || return 0
  read -r name pool address <"$memory"
  [ "$name $address" = "${hosts[0]} ${addresses[0]}" ] ||
    fail "the head was $name ($address) and is to be $(named 0) now; run '$0 down' first"
  while read -r name pool address; do
    in_array "$name" "${hosts[@]:0:num}" || { hosts+=("$name") pools+=("") addresses+=("$address"); }
  done <"$memory"
  [ ${#hosts[@]} -gt "$num" ] || return 0
  each_host stop $(seq "$num" $((${#hosts[@]} - 1)))
  for ((i = num; i < ${#hosts[@]}; i++)); do
    if [ "${codes[$i]}" = 0 ]; then
      say "$i" "down, for it is not among the hosts any more"
    else
      failed=1 && complain "$i"
    fi
  done
  [ "$failed" = 0 ] || fail "its Ray may still run there; call this again when it can be reached, $advice"
  hosts=("${hosts[@]:0:num}") pools=("${pools[@]:0:num}") addresses=("${addresses[@]:0:num}")
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
