#!/usr/bin/env bash
# Runs a command as one rank: rank 0 prints, the others write to $MPITRAIN_TESTS/LABEL-SIZE-rank-N.log.
rank=${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-0}}
[ "$rank" = 0 ] && exec "$@"
exec "$@" >"$MPITRAIN_TESTS/$MPITRAIN_TEST_LABEL-$MPITRAIN_TEST_RANKS-rank-$rank.log" 2>&1
