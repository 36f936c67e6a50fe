"""What every other room may use: shapes, dtypes, phases, regions, errors, random numbers, digests, machine facts."""
