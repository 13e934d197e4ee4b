"""Jobs with their attempts and logs, and the places where they are executed (server instances, hosts, agents), in the
API and on the command line."""

from __future__ import annotations

from datetime import timedelta

from ecluse.access import agents
from ecluse.access.commands import Command
from ecluse.access.listing import Listing
from ecluse.access.resource import Resource
from ecluse.access.surface import Act, Look, Surface
from ecluse.access.wire import Shape, camel
from ecluse.base.errors import NotFound
from ecluse.base.text import storable
from ecluse.db.connect import Connection
from ecluse.db.query import Row, fetch_all, fetch_one
from ecluse.flows.jobs import job_shapes as shapes
from ecluse.flows.jobs import places, states
from ecluse.flows.jobs.attempts import Unattended, unattended

surface = Surface("jobs")
READ = "jobs.read"
SHOWN = "SELECT * FROM job_list WHERE tenant_id = %s AND id = %s"
RUNS = "SELECT * FROM job_runs WHERE tenant_id = %s AND job_id = %s ORDER BY attempt"
NONE_ONLINE = """
SELECT h.id AS host, h.deleted_at AS deleted, max(a.last_seen_at) AS seen,
       CASE WHEN bool_and(a.revoked_at IS NOT NULL) THEN max(a.revoked_at) END AS revoked
FROM job_hosts h LEFT JOIN job_agent_list a ON a.tenant_id = h.tenant_id AND a.host_id = h.id
WHERE h.tenant_id = %s AND h.id = %s GROUP BY h.id HAVING NOT coalesce(bool_or(a.online), false)
"""
JOB = Resource(surface, "/api/jobs/{job_id}", "jobs", "job", "jobs", shapes.JobDetail)
SERVER = Resource(surface, "/api/jobs/servers/{server_id}", "jobs", "job_server", "jobs servers", shapes.ServerRow)
HOST = Resource(surface, "/api/jobs/hosts/{host_id}", "jobs", "job_host", "jobs hosts", shapes.HostRow)
AGENT = Resource(surface, "/api/jobs/agents/{agent_id}", "jobs", "job_agent", "jobs agents", shapes.AgentRow)
JOBS = Listing("jobs", shapes.JobRow, "job_list", READ, filters=shapes.JobFilters)
OF_SERVERS = Listing("servers", shapes.ServerRow, "job_server_list", READ, order=("id",))
OF_HOSTS = Listing("hosts", shapes.HostRow, "job_host_list", READ, order=("id",))
OF_AGENTS = Listing("agents", shapes.AgentRow, "job_agent_list", READ)


async def _known(look: Look, job_id: str) -> None:
    await find_job(look.connection, look.tenant, job_id)


JOB.lists(
    JOBS,
    list_jobs="List jobs of the organisation, the newest first.",
    columns=("id", "status", "type", "attempts", "errorCode", "scheduleId", "createdAt"),
)
SERVER.lists(
    OF_SERVERS,
    list_job_servers="List the server instances of the organisation.",
    columns=("id", "name", "host", "hostId"),
)
HOST.lists(OF_HOSTS, list_job_hosts="List the hosts of the organisation.", columns=("id", "name", "createdAt"))
AGENT.lists(
    OF_AGENTS,
    list_job_agents="List the agents of the organisation, the newest first; revoked ones, too.",
    columns=("id", "host", "online", "lastSeenAt", "running", "revokedAt"),
)
surface.listing(
    f"{JOB.one}/logs",
    Listing(
        "chunks", shapes.JobLogRow, "job_log_list", READ, shapes.LogFilters, ("attempt", "start"), named=("job_id",)
    ),
    check=_known,
    list_job_logs="List the log of a job, part by part, in order. Secrets in it are hidden.",
    command=Command("jobs logs", columns=("attempt",), text="text", empty="nothing was logged"),
)


@JOB.shows()
async def show_job(look: Look, job_id: str) -> Row:
    """Show a job with its attempts; the secrets in its payload are hidden."""
    return await read_job(look.connection, look.tenant, job_id, look.state.leasing.longest_pending)


@JOB.does("cancel", refuses=["ALREADY_ENDED"])
async def cancel_job(act: Act, job_id: str) -> Row:
    """Cancel a job: a waiting job fails with `CANCELLED` at once; a running one is stopped by its agent, which learns
    of it when it renews its lease."""
    await find_job(act.connection, act.tenant, job_id)
    await states.cancel(act.connection, job_id, act.caller.name)
    return await show_job(act, job_id)


@JOB.does("retry", refuses=["CONFLICT"], status=201)
async def retry_job(act: Act, job_id: str) -> Row:
    """Make a new job like this one, which must have failed; the failed job stays as it is."""
    await find_job(act.connection, act.tenant, job_id)
    return await show_job(act, await states.make_again(act.connection, job_id, act.caller.name))


@HOST.creates(refuses=["NAME_TAKEN", "LIMIT_REACHED"], arguments=("name",))
async def create_job_host(act: Act, body: shapes.NewHost) -> Row:
    """Create a host: a machine on which one agent executes jobs."""
    await act.require_room("job_hosts")
    host = await places.create(act.connection, act.tenant, body.name, act.caller.name)
    return await _place(act, "host", host)


@SERVER.creates(refuses=["NAME_TAKEN", "LIMIT_REACHED"], arguments=("name", "hostId"))
async def create_job_server(act: Act, body: shapes.NewServer) -> Row:
    """Create a server instance, which schedules name; the agent of its host executes its jobs."""
    await act.require_room("job_servers")
    server = await places.create(act.connection, act.tenant, body.name, act.caller.name, body.host_id)
    return await _place(act, "server", server)


@SERVER.shows()
async def show_job_server(look: Look, server_id: str) -> Row:
    """Show a server instance."""
    return await _place(look, "server", server_id)


@SERVER.changes(refuses=["NAME_TAKEN"], action="update")
async def change_job_server(act: Act, server_id: str, body: shapes.ChangedServer) -> Row:
    """Rename a server instance, or move it to another host."""
    await places.change_server(act.connection, act.tenant, server_id, body.model_dump(exclude_unset=True))
    return await _place(act, "server", server_id)


@SERVER.deletes(preview="show_job_server")
async def delete_job_server(act: Act, server_id: str) -> Row:
    """Delete a server instance. Its schedules make no jobs until they name another one."""
    await places.delete(act.connection, act.tenant, "server", server_id)
    return {"id": server_id, "deleted": True}


@HOST.shows(answer=shapes.HostDetail)
async def show_job_host(look: Look, host_id: str) -> Row:
    """Show a host, with the number of its jobs that wait and that its agent is executing."""
    host = await places.show(look.connection, look.tenant, "host", host_id)
    return _shaped(shapes.HostDetail, host | await places.open_jobs(look.connection, host_id))


@HOST.deletes(refuses=["CONFLICT"], preview="show_job_host")
async def delete_job_host(act: Act, host_id: str) -> Row:
    """Delete a host that has no server instances; its agent is revoked. Its pending jobs are not executed: they fail
    `NO_AGENT` at the end of their time to wait. Its running jobs count as lost when their leases end."""
    await places.delete(act.connection, act.tenant, "host", host_id)
    return {"id": host_id, "deleted": True}


@HOST.does("token", answer=shapes.NewToken, status=201)
async def create_enrolment_token(act: Act, host_id: str) -> Row:
    """Make a token with which an agent of this host enrols, once, within an hour. When it enrols, the former agent of
    the host is revoked."""
    token, expires_at = await agents.new_token(act.connection, act.tenant, host_id, act.caller.name)
    act.answers(201, token=token)
    return {"hostId": host_id, "expiresAt": expires_at}


@AGENT.shows()
async def show_agent(look: Look, agent_id: str) -> Row:
    """Show an agent."""
    return await _place(look, "agent", agent_id)


@AGENT.does("revoke", preview="show_agent")
async def revoke_job_agent(act: Act, agent_id: str) -> Row:
    """Revoke the credential of an agent: it is refused from then on, and its running jobs count as lost when their
    leases end."""
    if not await agents.revoke(act.connection, act.tenant, agent_id):
        act.changes_nothing()
    return await _place(act, "agent", agent_id)


async def read_job(connection: Connection, tenant: str, job_id: str, longest: timedelta) -> Row:
    """Return a job with its attempts, as it is answered; raise NotFound if the tenant has no such job."""
    job = await find_job(connection, tenant, job_id)
    runs = await fetch_all(connection, dict, RUNS, (tenant, job_id))
    waits = job["status"] == "pending"
    alone = await fetch_one(connection, dict, NONE_ONLINE, (tenant, job["host_id"])) if waits else None
    job["waiting"] = unattended(Unattended(**alone), runs[-1]["due_at"], longest) if alone else None
    return _shaped(shapes.JobDetail, job | {"runs": [_shaped(shapes.JobRunRow, run) for run in runs]})


async def find_job(connection: Connection, tenant: str, job_id: str) -> Row:
    job = await fetch_one(connection, dict, SHOWN, (tenant, job_id))
    if job is None:
        raise NotFound(f"There is no job {storable(job_id, 50)}. `ecluse jobs list` shows them.")
    return job


async def _place(look: Look, kind: str, record_id: str) -> Row:
    row: dict[str, type[Shape]] = {"host": shapes.HostRow, "server": shapes.ServerRow, "agent": shapes.AgentRow}
    return _shaped(row[kind], await places.show(look.connection, look.tenant, kind, record_id))


def _shaped(shape: type[Shape], row: Row) -> Row:
    return camel({name: row[name] for name in shape.model_fields})
