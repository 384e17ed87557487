/* A closed-loop load generator for OpenAI chat completions: one thread, epoll. Linux only; loopback only; bounded in time
 * and number. Each connection sends its next request when the answer to its last one is complete. Prints one JSON line.
 *
 *   load --port P [--connections N] [--requests N] [--seconds S] [--warmup N] [--model NAME] [--keys FILE]
 *        [--max-tokens N] [--pad-bytes N] [--stream 1] [--interval-us N] [--path PATH] [--start N]
 *
 * --warmup requests come first and are not counted. --keys: one API key per line, sent in turn. --pad-bytes: so much more
 * prompt. --interval-us: asks the stub for paced chunks (see stub.c); 0 is a burst. Every prompt is another one from its
 * first word of the user's message: a number that counts on from --start (default: the clock).
 * ttft: until the first chunk with content. delay: from the stub's write of a chunk, by the stamp in it, until it is read
 * here; both read CLOCK_MONOTONIC of one machine. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { CONNECTIONS_MAX = 4096, SECONDS_MAX = 600, KEYS_MAX = 4096, NUMBER_DIGITS = 16, STAMP_DIGITS = 16, HEAD_MAX = 8192 };
enum state { IDLE, SENDING, HEAD, BODY };

typedef struct {
  float *at;
  size_t used, size;
} samples;

typedef struct {
  int fd;
  enum state state;
  char *request; /* this connection's own copy: its number and key change */
  size_t request_size, sent;
  uint64_t began_ns, first_ns;
  char head[HEAD_MAX];
  size_t head_used;
  int status, chunked, closes, done_seen, counted;
  long left;        /* bytes of the body or of the chunk that are still to come; -1: until the end of file */
  int chunk_state;  /* 0 size line, 1 data, 2 its line end, 3 trailer */
  char size_line[32];
  int size_used;
  char line[512]; /* an event's line that was cut between two reads: its beginning */
  size_t line_used;
  int line_long;
  long events;
} conn;

static struct {
  int port, connections, stream, interval_us, max_tokens;
  long requests, warmup, pad_bytes, start;
  double seconds;
  const char *model, *keys, *path;
} asked = {.connections = 1, .requests = 1000000, .seconds = 10, .model = "bench-model", .path = "/v1/chat/completions"};

static int poll_fd, stopping;
static char *keys[KEYS_MAX], *body;
static long key_count, next_key, body_size, number_at, started, finished, next_number;
static long ok, refused, errors, reconnects, cut_streams, events_total, events_least = -1, events_most;
static uint64_t measured_from_ns, last_end_ns, bytes_read;
static samples latency, ttft, delay;
static char first_error[256];

static uint64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ull + t.tv_nsec;
}
static void fail(const char *what) {
  fprintf(stderr, "load: %s%s%s\n", what, errno ? ": " : "", errno ? strerror(errno) : "");
  exit(2);
}
static void add(samples *s, double value) {
  if (s->used == s->size) {
    s->size = s->size ? s->size * 2 : 65536;
    s->at = realloc(s->at, s->size * sizeof *s->at);
  }
  s->at[s->used++] = value;
}
static int by_value(const void *a, const void *b) {
  float x = *(const float *)a, y = *(const float *)b;
  return (x > y) - (x < y);
}
static void note_error(const char *format, int status, const char *text, size_t n) {
  if (first_error[0]) return;
  char plain[160];
  size_t used = 0;
  for (size_t i = 0; i < n && used < sizeof plain - 1; i++)
    plain[used++] = text[i] < 32 || text[i] == '"' || text[i] == '\\' ? ' ' : text[i];
  plain[used] = 0;
  snprintf(first_error, sizeof first_error, format, status, plain);
}

/* ---- requests ---- */
static void read_keys(void) {
  FILE *file = fopen(asked.keys, "r");
  char line[512];
  if (!file) fail(asked.keys);
  while (key_count < KEYS_MAX && fgets(line, sizeof line, file)) {
    line[strcspn(line, "\r\n")] = 0;
    if (line[0]) keys[key_count++] = strdup(line);
  }
  fclose(file);
  if (!key_count) fail("the file of keys is empty");
}
static void make_body(void) {
  static const char SYSTEM[] = "You are a helpful assistant. Answer briefly and precisely, in the language of the question, "
                               "and say so when you do not know.";
  body = malloc(4096 + asked.pad_bytes);
  long n = sprintf(body, "{\"model\":\"%s\",\"messages\":[{\"role\":\"system\",\"content\":\"%s\"},{\"role\":\"user\","
                         "\"content\":\"", asked.model, SYSTEM);
  number_at = n;
  n += sprintf(body + n, "%0*d: what does a KV-aware router weigh when it picks a worker for this prompt? ", NUMBER_DIGITS, 0);
  for (long i = 0; i < asked.pad_bytes; i++) body[n++] = i % 6 == 5 ? ' ' : 'a' + i % 23;
  n += sprintf(body + n, "\"}],\"temperature\":0.7,\"max_tokens\":%d", asked.max_tokens);
  if (asked.stream) n += sprintf(body + n, ",\"stream\":true,\"stream_options\":{\"include_usage\":true}");
  if (asked.interval_us) n += sprintf(body + n, ",\"seed\":%d", asked.interval_us);
  body_size = n + sprintf(body + n, "}");
}
static void write_request(conn *c) {
  const char *key = key_count ? keys[next_key++ % key_count] : NULL;
  int head = sprintf(c->request,
                     "POST %s HTTP/1.1\r\nhost: 127.0.0.1:%d\r\ncontent-type: application/json\r\naccept: */*\r\n"
                     "user-agent: load\r\n%s%s%scontent-length: %ld\r\n\r\n", asked.path, asked.port,
                     key ? "authorization: Bearer " : "", key ? key : "", key ? "\r\n" : "", body_size);
  memcpy(c->request + head, body, body_size);
  unsigned long number = next_number++;
  for (int i = NUMBER_DIGITS - 1; i >= 0; i--, number /= 10) c->request[head + number_at + i] = '0' + number % 10;
  c->request_size = head + body_size;
  c->sent = 0;
}
static void watch(conn *c, int op, uint32_t events) {
  struct epoll_event e = {.events = events, .data.ptr = c};
  if (epoll_ctl(poll_fd, op, c->fd, &e)) fail("epoll_ctl");
}
static void dial(conn *c) {
  int one = 1;
  struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(asked.port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  c->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (c->fd < 0 || connect(c->fd, (void *)&a, sizeof a)) fail("connect");
  setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  fcntl(c->fd, F_SETFL, O_NONBLOCK);
  c->state = IDLE;
  watch(c, EPOLL_CTL_ADD, EPOLLIN);
}
static void redial(conn *c) {
  close(c->fd);
  reconnects++;
  dial(c);
}
static int send_more(conn *c) { /* 0, or -1 when the peer is gone */
  ssize_t n = send(c->fd, c->request + c->sent, c->request_size - c->sent, MSG_NOSIGNAL);
  if (n < 0 && errno != EAGAIN) return -1;
  int was_waiting = c->state == SENDING;
  if (n > 0) c->sent += n;
  c->state = c->sent == c->request_size ? HEAD : SENDING;
  if (c->state == SENDING && !was_waiting) watch(c, EPOLL_CTL_MOD, EPOLLIN | EPOLLOUT);
  if (c->state == HEAD && was_waiting) watch(c, EPOLL_CTL_MOD, EPOLLIN);
  return 0;
}
static void start(conn *c) {
  while (!stopping && started < asked.warmup + asked.requests) {
    if (started == asked.warmup) measured_from_ns = now_ns();
    c->counted = started++ >= asked.warmup;
    write_request(c);
    c->head_used = c->line_used = c->line_long = c->size_used = c->chunk_state = c->done_seen = c->events = 0;
    c->first_ns = 0;
    c->began_ns = now_ns();
    if (!send_more(c)) return;
    errors++, finished++;
    redial(c);
  }
  c->state = IDLE;
}

/* ---- answers ---- */
static void see_line(conn *c, const char *line, size_t n, uint64_t now) { /* a line of an event stream, without its end */
  if (n < 5 || memcmp(line, "data:", 5)) return;
  if (memmem(line, n < 16 ? n : 16, "[DONE]", 6)) { c->done_seen = 1; return; }
  const char *at = memchr(line, '@', n);
  if (!at || line + n - at <= STAMP_DIGITS) return;
  uint64_t stamp = 0;
  for (int i = 1; i <= STAMP_DIGITS; i++) {
    if (at[i] < '0' || at[i] > '9') return;
    stamp = stamp * 10 + (at[i] - '0');
  }
  if (!c->first_ns) c->first_ns = now;
  c->events++;
  if (!c->counted) return;
  events_total++;
  add(&delay, ((double)now - stamp * 100.0) / 1e3);
}
static void see_body(conn *c, const char *p, size_t n, uint64_t now) {
  if (c->status != 200) note_error("%d %s", c->status, p, n);
  if (!asked.stream || c->status != 200) return;
  while (n) {
    const char *end = memchr(p, '\n', n);
    size_t part = end ? (size_t)(end - p) : n;
    if (end && !c->line_used) see_line(c, p, part, now);
    else { /* joined with what an earlier read left; a line longer than the buffer keeps its beginning: the stamp is there */
      size_t room = sizeof c->line - c->line_used, copied = part < room ? part : room;
      memcpy(c->line + c->line_used, p, copied);
      c->line_used += copied;
      if (end) { see_line(c, c->line, c->line_used, now); c->line_used = 0; }
    }
    if (!end) return;
    n -= part + 1, p = end + 1;
  }
}
static void finish(conn *c) {
  uint64_t now = now_ns();
  finished++;
  if (c->status != 200) refused++;
  else if (c->counted) {
    ok++, last_end_ns = now;
    add(&latency, (now - c->began_ns) / 1e3);
    if (asked.stream) {
      cut_streams += !c->done_seen;
      if (c->first_ns) add(&ttft, (c->first_ns - c->began_ns) / 1e3);
      if (events_least < 0 || c->events < events_least) events_least = c->events;
      if (c->events > events_most) events_most = c->events;
    }
  }
  if (c->closes) redial(c);
  start(c);
}
static size_t take_head(conn *c, const char *p, size_t n) { /* bytes used; the state is BODY when the head is complete */
  size_t before = c->head_used, room = HEAD_MAX - 1 - before, part = n < room ? n : room;
  memcpy(c->head + before, p, part);
  c->head_used += part;
  c->head[c->head_used] = 0;
  char *end = strstr(c->head, "\r\n\r\n");
  if (!end) {
    if (!room) fail("an answer's head is longer than 8 KiB");
    return part;
  }
  end[2] = 0;
  char *length = strcasestr(c->head, "\r\ncontent-length:");
  c->status = atoi(c->head + 9);
  c->chunked = strcasestr(c->head, "\r\ntransfer-encoding: chunked") != NULL;
  c->closes = strcasestr(c->head, "\r\nconnection: close") != NULL;
  c->left = c->chunked ? 0 : length ? atol(length + 17) : -1;
  c->state = BODY;
  return end + 4 - c->head - before;
}
static int take_chunks(conn *c, const char *p, size_t n, uint64_t now) { /* 1: the answer is complete */
  while (n) {
    if (c->chunk_state == 1) {
      size_t part = n < (size_t)c->left ? n : (size_t)c->left;
      see_body(c, p, part, now);
      p += part, n -= part, c->left -= part;
      if (!c->left) c->chunk_state = 2;
      continue;
    }
    char byte = *p++;
    n--;
    if (c->chunk_state == 2) { if (byte == '\n') c->chunk_state = 0; }
    else if (byte != '\n') { if (byte != '\r' && c->size_used < (int)sizeof c->size_line - 1) c->size_line[c->size_used++] = byte; }
    else if (c->chunk_state == 3) { if (!c->size_used) return 1; c->size_used = 0; }
    else {
      c->size_line[c->size_used] = 0;
      c->size_used = 0;
      c->left = strtol(c->size_line, NULL, 16);
      c->chunk_state = c->left ? 1 : 3;
    }
  }
  return 0;
}
static int take(conn *c, const char *p, size_t n, uint64_t now) { /* 1: the answer is complete */
  if (c->state == SENDING) c->state = HEAD; /* refused before the request was read whole */
  if (c->state == HEAD) {
    size_t used = take_head(c, p, n);
    p += used, n -= used;
    if (c->state == HEAD) return 0;
    if (!c->chunked && c->left == 0) return 1;
  }
  if (c->chunked) return take_chunks(c, p, n, now);
  see_body(c, p, n, now);
  if (c->left < 0) return 0;
  c->left -= (long)n < c->left ? (long)n : c->left;
  return !c->left;
}
static void take_in(conn *c) {
  static char buffer[262144];
  ssize_t n = recv(c->fd, buffer, sizeof buffer, 0);
  if (n < 0 && errno == EAGAIN) return;
  if (n > 0) {
    bytes_read += n;
    if (c->state != IDLE && take(c, buffer, n, now_ns())) finish(c);
    return;
  }
  if (c->state == BODY && !c->chunked && c->left < 0) { c->closes = 1; finish(c); return; }
  int lost = c->state != IDLE;
  if (lost) errors++, finished++, note_error("%d the connection was closed in the middle of an answer%s", c->status, "", 0);
  redial(c);
  if (lost) start(c);
}

/* ---- options and report ---- */
static void read_options(int count, char **args) {
  struct { const char *name; int *i; long *l; const char **s; } known[] = {
      {"--port", &asked.port, 0, 0}, {"--connections", &asked.connections, 0, 0}, {"--requests", 0, &asked.requests, 0},
      {"--warmup", 0, &asked.warmup, 0}, {"--model", 0, 0, &asked.model}, {"--keys", 0, 0, &asked.keys},
      {"--max-tokens", &asked.max_tokens, 0, 0}, {"--pad-bytes", 0, &asked.pad_bytes, 0}, {"--stream", &asked.stream, 0, 0},
      {"--interval-us", &asked.interval_us, 0, 0}, {"--path", 0, 0, &asked.path}, {"--start", 0, &asked.start, 0},
  };
  for (int i = 1; i < count; i += 2) {
    size_t k = 0;
    if (i + 1 == count) { fprintf(stderr, "load: %s needs a value\n", args[i]); exit(2); }
    if (!strcmp(args[i], "--seconds")) { asked.seconds = atof(args[i + 1]); continue; }
    while (k < sizeof known / sizeof *known && strcmp(known[k].name, args[i])) k++;
    if (k == sizeof known / sizeof *known) { fprintf(stderr, "load: unknown option %s\n", args[i]); exit(2); }
    if (known[k].i) *known[k].i = atoi(args[i + 1]);
    else if (known[k].l) *known[k].l = atol(args[i + 1]);
    else *known[k].s = args[i + 1];
  }
  errno = 0;
  if (asked.port < 1 || asked.port > 65535) fail("--port is 1 to 65535");
  if (asked.connections < 1 || asked.connections > CONNECTIONS_MAX) fail("--connections is 1 to 4096");
  if (asked.seconds <= 0 || asked.seconds > SECONDS_MAX) fail("--seconds is above 0 and at most 600");
  if (asked.pad_bytes < 0 || asked.pad_bytes > (32 << 20)) fail("--pad-bytes is 0 to 33554432");
  if (asked.requests < 1 || asked.warmup < 0) fail("--requests is at least 1, --warmup at least 0");
  if (asked.max_tokens < 1) asked.max_tokens = 2;
}
static void print_samples(const char *name, samples *s) {
  double sum = 0;
  qsort(s->at, s->used, sizeof *s->at, by_value);
  for (size_t i = 0; i < s->used; i++) sum += s->at[i];
  printf(",\"%s_us\":", name);
  if (!s->used) { printf("null"); return; }
#define AT(share) s->at[(size_t)((s->used - 1) * (share) + 0.5)]
  printf("{\"count\":%zu,\"mean\":%.1f,\"p50\":%.1f,\"p90\":%.1f,\"p99\":%.1f,\"max\":%.1f}", s->used, sum / s->used,
         AT(.5), AT(.9), AT(.99), AT(1.0));
}
static void report(int timed_out) {
  double took = ok ? (last_end_ns - measured_from_ns) / 1e9 : 0;
  printf("{\"connections\":%d,\"took_s\":%.4f,\"ok\":%ld,\"refused\":%ld,\"errors\":%ld,\"reconnects\":%ld,\"timed_out\":%s,"
         "\"sent\":%ld,\"requests_per_s\":%.1f,\"read_bytes\":%lu", asked.connections, took, ok, refused, errors, reconnects,
         timed_out ? "true" : "false", started, took > 0 ? ok / took : 0, (unsigned long)bytes_read);
  print_samples("latency", &latency);
  printf(",\"chunks\":%ld,\"chunks_per_s\":%.1f,\"chunks_least\":%ld,\"chunks_most\":%ld,\"cut_streams\":%ld", events_total,
         took > 0 ? events_total / took : 0, events_least < 0 ? 0 : events_least, events_most, cut_streams);
  print_samples("ttft", &ttft);
  print_samples("delay", &delay);
  printf(",\"first_error\":\"%s\"}\n", first_error);
}
int main(int count, char **args) {
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  read_options(count, args);
  if (asked.keys) read_keys();
  make_body();
  next_number = asked.start ? asked.start : (long)(now_ns() / 1000);
  poll_fd = epoll_create1(EPOLL_CLOEXEC);
  conn *conns = calloc(asked.connections, sizeof *conns);
  for (int i = 0; i < asked.connections; i++) {
    conns[i].request = malloc(body_size + 2048 + strlen(asked.path));
    dial(&conns[i]);
  }
  uint64_t began = measured_from_ns = now_ns(), limit = began + asked.seconds * 1e9, patience = limit + 20000000000ull;
  for (int i = 0; i < asked.connections; i++) start(&conns[i]);
  struct epoll_event events[512];
  while (finished < asked.warmup + asked.requests) {
    int n = epoll_wait(poll_fd, events, 512, 100);
    uint64_t now = now_ns();
    if (now > limit) stopping = 1;
    if (stopping) {
      int busy = 0;
      for (int i = 0; i < asked.connections; i++) busy += conns[i].state != IDLE;
      if (!busy || now > patience) break;
    }
    for (int i = 0; i < n; i++) {
      conn *c = events[i].data.ptr;
      if (events[i].events & EPOLLOUT && c->state == SENDING && send_more(c)) {
        errors++, finished++;
        redial(c);
        start(c);
        continue;
      }
      if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) take_in(c);
    }
  }
  report(finished < started);
  return 0;
}
