"""Settings and logs of other frameworks, read into farpipe's documents, and plans as their settings."""
