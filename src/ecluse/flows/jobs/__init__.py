"""Jobs: schedules hand jobs to the agents on the servers of an organisation (a tenant). A fire writes rows and starts
no run: the agents do the work."""
