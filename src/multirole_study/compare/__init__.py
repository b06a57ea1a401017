"""Compare arms of runs: which runs (`arms`), their numbers (`measures`), intervals and tests (`estimates`), corrections, looks and verdicts (`study`)."""
