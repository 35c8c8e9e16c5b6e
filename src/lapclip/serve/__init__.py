"""`lapclip serve`: a model and its index over HTTP, safe by default; requests that wait are embedded together."""
