#!/bin/sh
# Slurm Prolog: tell the collector that a job begins here, and make the job's private directory.
# Always exits 0, silently, within 2 s: Slurm drains a node whose Prolog fails. See ../README.md.

# --- the same in Prolog and Epilog; tests/test_hooks.py keeps the two equal ---------------------
trap 'exit 0' EXIT
trap : HUP INT TERM # slurmd's time-out: `wait` below returns, and nothing is left running
trap '' XFSZ        # a file size limit is a failed write, not a death
exec </dev/null >/dev/null 2>&1
PATH=/usr/bin:/bin:/usr/sbin:/sbin # Slurm gives hooks none
export PATH LC_ALL=C
umask 077
set -fC # no globs; never write through what is there already

site=${TRAINARCHIVE_HOOKS_CONF:-/etc/trainarchive/hooks.conf}
spool=/var/spool/trainarchive
wait_s=0
# shellcheck disable=SC3067 # -O, "owned by whoever runs this": not in POSIX; dash, bash and busybox have it
if [ -f "$site" ] && [ -O "$site" ]; then # read, never sourced: a setting is not code
	while IFS= read -r line || [ -n "$line" ]; do
		case $line in
		TRAINARCHIVE_SPOOL=*) spool=${line#*=} ;;
		TRAINARCHIVE_EPILOG_WAIT_S=*) wait_s=${line#*=} ;;
		esac
	done <"$site"
fi
spool=${TRAINARCHIVE_SPOOL:-$spool}
spool=${spool%/}
wait_s=${TRAINARCHIVE_EPILOG_WAIT_S:-$wait_s}

job=${SLURM_JOB_ID:-${SLURM_JOBID-}}
case $job in '' | *[!0-9]* | 0* | ???????????*) exit ;; esac
attempt=${SLURM_JOB_RESTART_COUNT:-0}
case $attempt in *[!0-9]* | 0?* | ??????????*) attempt=0 ;; esac

# The spool, and in it notices/ and jobs/, must belong to whoever runs this (root) and be writable by
# nobody else. That costs a process to ask, so it is asked once: what passed gets the sticky bit.
# `chmod 777` takes the bit away again, and where it stays it keeps others' hands off what is in there.
marked() {
	# shellcheck disable=SC3067 # as above
	[ -O . ] && [ -k . ]
}
enter() { # $PWD is the true path: a symbolic link does not pass, and what `.` is nobody can change
	cd -P "./$1" && [ "$PWD" = "$top/$1" ] && marked
}
private_to_us() {
	# shellcheck disable=SC2046 # numbers, to be split
	set -- $(stat -c '%u %a' /proc/self/. "$@") # /proc/self has the owner of whoever asks
	[ $# -ge 4 ] || return
	us=$1
	while [ $# -gt 0 ]; do
		[ "$1" = "$us" ] || return
		case $2 in *[2367] | *[2367]?) return 1 ;; esac
		shift 2
	done
}
prepare() {
	private_to_us . || return
	[ -d notices ] || mkdir -m 0700 notices
	[ -d jobs ] || mkdir -m 0711 jobs
	private_to_us . notices jobs && chmod +t notices jobs .
}
enter_spool() {
	case $spool in /*) ;; *) return 1 ;; esac
	[ ! -h "$spool" ] && cd -P "$spool/" || return
	top=$PWD
	marked && [ -k notices ] && [ -k jobs ] || prepare || return
	enter notices
}

# Writes NAME=value records, each ended by NUL; whole under its last name, or not at all.
# TRAINARCHIVE_END tells the reader that nothing was cut off by a crash.
write_notice() {
	read -r uptime _ </proc/uptime
	notice=$1.$job.$attempt-$$-${uptime%.*}${uptime#*.}
	shift
	while [ -e "$notice" ] || [ -e ".tmp-$notice" ]; do notice=$notice.1; done
	printf '%s=%s\0' "$@" \
		SLURM_JOB_ID "$job" \
		SLURM_JOB_RESTART_COUNT "$attempt" \
		SLURM_CLUSTER_NAME "${SLURM_CLUSTER_NAME-}" \
		SLURMD_NODENAME "${SLURMD_NODENAME-}" \
		SLURM_JOB_SLUID "${SLURM_JOB_SLUID-}" \
		SLURM_JOB_UID "${SLURM_JOB_UID:-${SLURM_UID-}}" \
		SLURM_JOB_USER "${SLURM_JOB_USER-}" \
		SLURM_JOB_GID "${SLURM_JOB_GID-}" \
		SLURM_JOB_NODELIST "${SLURM_JOB_NODELIST:-${SLURM_NODELIST-}}" \
		SLURM_JOB_NUM_NODES "${SLURM_JOB_NUM_NODES-}" \
		SLURM_JOB_PARTITION "${SLURM_JOB_PARTITION-}" \
		SLURM_JOB_ACCOUNT "${SLURM_JOB_ACCOUNT-}" \
		SLURM_JOB_COMMENT "${SLURM_JOB_COMMENT-}" \
		SLURM_JOB_WORK_DIR "${SLURM_JOB_WORK_DIR-}" \
		SLURM_JOB_STDOUT "${SLURM_JOB_STDOUT-}" \
		SLURM_JOB_STDERR "${SLURM_JOB_STDERR-}" \
		SLURM_JOB_START_TIME "${SLURM_JOB_START_TIME-}" \
		SLURM_JOB_EXIT_CODE "${SLURM_JOB_EXIT_CODE-}" \
		SLURM_JOB_EXIT_CODE2 "${SLURM_JOB_EXIT_CODE2-}" \
		SLURM_JOB_DERIVED_EC "${SLURM_JOB_DERIVED_EC-}" \
		TRAINARCHIVE_END 1 >".tmp-$notice" && mv -f ".tmp-$notice" "$notice" && return
	rm -f ".tmp-$notice"
	return 1
}

# Runs work() for at most $1 seconds. This shell itself touches no file of the spool: on a hung
# mount it would hang too. Work that cannot even be killed is left behind.
limited() {
	sleep "$1" &
	limit=$!
	{
		work
		kill -KILL "$limit"
	} &
	level=$!
	wait "$limit"
	[ $? -eq 137 ] && wait "$level" && return
	all=
	while [ -n "$level" ]; do
		next=
		for pid in $level; do
			kill -STOP "$pid"
			kids=
			read -r kids <"/proc/$pid/task/$pid/children"
			next="$next$kids"
		done
		all="$all $level"
		level=$next
	done
	# shellcheck disable=SC2086 # process ids, to be split
	kill -KILL "$limit" $all
}
# --- end of the same ----------------------------------------------------------------------------

uid=${SLURM_JOB_UID:-${SLURM_UID-}}
gid=${SLURM_JOB_GID-}
case $uid in *[!0-9]*) uid= ;; esac
case $gid in *[!0-9]*) gid= ;; esac
sluid=${SLURM_JOB_SLUID-}
case $sluid in *[!A-Za-z0-9.-]*) sluid= ;; esac
private=$spool/jobs/$job.$attempt

# What stands there already is this run's, from an earlier call; else an earlier run's whose job id
# came back, perhaps to the same user: a file beside it, ours, says whose it is (by SLUID, the same in
# every call for a run; before Slurm 25.11 there is none, and only the user counts).
same_run() {
	[ "$(stat -c %u "$mine")" = "$uid" ] || return
	whose=
	[ ! -f ".$mine" ] || IFS= read -r whose <".$mine"
	[ -z "$whose" ] || [ -z "$sluid" ] || [ "$whose" = "$sluid" ]
}
# The + keeps chown from asking the name service, which may be on the network.
make_private() {
	cd .. && enter jobs || return
	mine=$job.$attempt
	if [ -e "$mine" ] || [ -h "$mine" ]; then
		same_run && return
		aside=$mine~$$
		while [ -e "$aside" ] || [ -h "$aside" ]; do aside=$aside.1; done
		mv "$mine" "$aside" || return
	fi
	if [ -n "$sluid" ] || [ -e ".$mine" ]; then # before the directory: killed in between, it is nobody else's
		printf '%s\n' "$sluid" >|".$mine"
	fi
	mkdir -m 0700 "$mine" && chown -h "+$uid${gid:+:+$gid}" "$mine"
}
work() {
	enter_spool || return
	if [ -z "$uid" ]; then
		write_notice prolog TRAINARCHIVE_EVENT prolog
		return
	fi
	make_private &
	making=$!
	write_notice prolog TRAINARCHIVE_EVENT prolog TRAINARCHIVE_DIR "$private"
	wait "$making"
}
limited 1.5
