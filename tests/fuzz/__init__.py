"""Coverage-guided fuzzing of every parser that reads bytes from outside: `make fuzz`."""
