"""The page of the service: what its API says as tables, and forms that ask what the API asks."""
