"""The report of a run as one HTML page, made from what the run's folder keeps."""
