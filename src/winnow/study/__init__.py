"""Tools for runs and models outside training: reports, comparisons, calibration, votes, warm starts."""
