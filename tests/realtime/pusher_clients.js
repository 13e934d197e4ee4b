// Unmodified pusher-js clients, driven by lines of JSON on stdin; what they see goes out as lines of JSON on stdout.
const Pusher = require("./vendored/pusher-js-8.6.0/pusher.js");
const clients = {};
const say = (client, what, more) => console.log(JSON.stringify({ client, what, ...more }));

const commands = {
  connect({ client, key, port, bearer }) {
    const pusher = new Pusher(key, {
      cluster: "",
      wsHost: "127.0.0.1",
      wsPort: port,
      forceTLS: false,
      enabledTransports: ["ws"],
      enableStats: false,
      channelAuthorization: {
        endpoint: `http://127.0.0.1:${port}/pusher/auth`,
        headers: bearer ? { Authorization: `Bearer ${bearer}` } : {},
      },
    });
    clients[client] = pusher;
    pusher.connection.bind("state_change", ({ current }) =>
      say(client, "state", { state: current, socket_id: pusher.connection.socket_id }),
    );
    pusher.connection.bind("error", (error) => say(client, "error", { error }));
    pusher.bind_global((event, data) => say(client, "global", { event, data }));
  },
  subscribe({ client, channel }) {
    const joined = clients[client].subscribe(channel);
    joined.bind_global((event, data) => say(client, "event", { channel, event, data }));
  },
  unsubscribe({ client, channel }) {
    clients[client].unsubscribe(channel);
  },
  trigger({ client, channel, event, data }) {
    clients[client].channel(channel).trigger(event, data);
  },
  ping({ client }) {
    clients[client].connection.connection.ping();
  },
  disconnect() {
    for (const client of Object.keys(clients)) {
      clients[client].disconnect();
      delete clients[client];
    }
  },
};

require("readline")
  .createInterface({ input: process.stdin })
  .on("line", (line) => {
    const command = JSON.parse(line);
    commands[command.do](command);
  })
  .on("close", () => process.exit(0));
