"""Steps from one schema of `infra.tables` to the next, by alembic; a new database is made whole by the last one.

A step is a file whose `revision` is the number of the schema that it leads to; it is never changed after a release.
"""
