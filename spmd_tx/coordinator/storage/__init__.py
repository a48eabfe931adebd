"""The database and the disk: tables, migrations, outages, and folders that survive a crash."""
