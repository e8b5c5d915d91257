"""Object stores: one contract, many places to keep bytes."""
