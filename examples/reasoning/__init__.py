"""The reasoning job: tasks of the package reasoning-gym, and a mixture-of-experts model that reads them character by character."""
