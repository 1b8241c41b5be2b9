"""Sources of images: folders, lists, shards, Parquet, object storage and videos."""
