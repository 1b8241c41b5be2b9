"""Names of the files in a run folder."""

CONFIG, SUMMARY, METRICS, SKIPPED = "config.yaml", "summary.json", "metrics.csv", "skipped.csv"
REPORT = "report"
TRUNK_CACHE = "trunk"
