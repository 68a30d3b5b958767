"""S3: copies of what `s3://` URLs name, and the mirror of a run's results; the only room that imports boto3."""
