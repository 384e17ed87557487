/* A stub of a vLLM engine: one thread, epoll, many ports. It answers as fast as it can, so that a gateway is what is
 * measured. Linux only; loopback only.
 *
 *   stub --ports N [--model NAME]     prints {"ports":[...]} when it listens; ends on SIGTERM or when its parent dies
 *
 * POST /v1/chat/completions, /v1/completions
 *   JSON with usage, or with "stream":true server-sent events in the shape recorded from vLLM 0.32 (tests/recorded):
 *   a role chunk, then "max_tokens" content chunks, then usage when "include_usage":true, then [DONE]. With
 *   "continuous_usage_stats":true each chunk carries the usage so far. One chunk is one write, as an engine does it.
 *   "seed": microseconds between chunks (paced; the first comes after one interval); none or 0: all at once (burst).
 *   Each content chunk is "@" and 16 digits: CLOCK_MONOTONIC in units of 100 ns when it was written (see load.c).
 *   prompt_tokens is a quarter of the body's bytes; half of it, in whole blocks of 16, counts as cached.
 * POST /v1/chat/completions/render, /tokenize: token ids, one per 4 bytes (vllm-router's cache_aware asks for them).
 * GET /v1/models, /metrics (vLLM's counters, one set per port), /health, and what routers ask of an engine at start.
 *   stub_requests_total, stub_render_total and stub_unknown_total say what was asked. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
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

enum { PORTS_MAX = 64, STREAMS_MAX = 65536, BODY_MAX = 64 << 20, CHUNKS_MAX = 100000 };

typedef struct {
  int fd, port;
  uint64_t requests, renders, unknown, prompt_tokens, cached_tokens, output_tokens, finished, running;
} engine;

typedef struct conn {
  int fd;
  engine *engine; /* NULL: this is a listening socket, see `listens` */
  engine *listens;
  char *in;
  size_t in_size, in_used;
  char *out; /* what the socket did not take */
  size_t out_size, out_used, out_sent;
  int streaming, usage_at_end, usage_each;
  long chunks, chunks_left, prompt_tokens;
  uint64_t interval_ns, due_ns;
  int heap_at; /* index in the heap + 1; 0: not there */
  struct conn *next_dead;
} conn;

static int poll_fd, heap_used;
static conn *heap[STREAMS_MAX], *dead; /* freed after the events that may still name them */
static engine engines[PORTS_MAX];
static int engine_count = 8;
static const char *model = "bench-model";

static uint64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ull + t.tv_nsec;
}

/* ---- timers: a binary heap by due time ---- */
static void heap_put(int at, conn *c) { heap[at] = c; c->heap_at = at + 1; }
static void heap_up(int at, conn *c) {
  for (; at && heap[(at - 1) / 2]->due_ns > c->due_ns; at = (at - 1) / 2) heap_put(at, heap[(at - 1) / 2]);
  heap_put(at, c);
}
static void heap_down(int at, conn *c) {
  for (int child; (child = 2 * at + 1) < heap_used; at = child) {
    if (child + 1 < heap_used && heap[child + 1]->due_ns < heap[child]->due_ns) child++;
    if (heap[child]->due_ns >= c->due_ns) break;
    heap_put(at, heap[child]);
  }
  heap_put(at, c);
}
static void heap_remove(conn *c) {
  int at = c->heap_at - 1;
  if (at < 0) return;
  c->heap_at = 0;
  conn *last = heap[--heap_used];
  if (last == c) return;
  heap_up(at, last);
  heap_down(last->heap_at - 1, last);
}

/* ---- connections ---- */
static void watch(conn *c, int op, uint32_t events) {
  struct epoll_event e = {.events = events, .data.ptr = c};
  epoll_ctl(poll_fd, op, c->fd, &e);
}
static void end_stream(conn *c) {
  if (!c->streaming) return;
  heap_remove(c);
  c->streaming = 0;
  c->engine->running--;
}
static void drop(conn *c) {
  if (c->fd < 0) return;
  end_stream(c);
  close(c->fd);
  c->fd = -1;
  c->next_dead = dead;
  dead = c;
}
static void bury(void) {
  for (conn *c; (c = dead);) {
    dead = c->next_dead;
    free(c->in), free(c->out), free(c);
  }
}
static int push(conn *c, const char *bytes, size_t n) { /* 0, or -1 when the peer is gone */
  ssize_t sent = 0;
  if (c->out_sent == c->out_used) {
    c->out_sent = c->out_used = 0;
    sent = send(c->fd, bytes, n, MSG_NOSIGNAL);
    if (sent < 0) {
      if (errno != EAGAIN) return -1;
      sent = 0;
    }
    if ((size_t)sent == n) return 0;
  }
  size_t left = n - sent;
  if (c->out_used + left > c->out_size) {
    c->out_size = (c->out_used + left) * 2;
    c->out = realloc(c->out, c->out_size);
  }
  memcpy(c->out + c->out_used, bytes + sent, left);
  c->out_used += left;
  watch(c, EPOLL_CTL_MOD, EPOLLIN | EPOLLOUT);
  return 0;
}
static int flush(conn *c) {
  ssize_t sent = send(c->fd, c->out + c->out_sent, c->out_used - c->out_sent, MSG_NOSIGNAL);
  if (sent < 0) return errno == EAGAIN ? 0 : -1;
  c->out_sent += sent;
  if (c->out_sent == c->out_used) {
    c->out_sent = c->out_used = 0;
    watch(c, EPOLL_CTL_MOD, EPOLLIN);
  }
  return 0;
}

/* ---- answers ---- */
static char *text(char *p, const char *s) { size_t n = strlen(s); memcpy(p, s, n); return p + n; }
static char *number(char *p, unsigned long v) {
  char digits[24];
  int n = 0;
  do digits[n++] = '0' + v % 10; while (v /= 10);
  while (n) *p++ = digits[--n];
  return p;
}
static int answer(conn *c, int status, const char *type, const char *body, size_t n) {
  char *all = malloc(n + 256);
  int head = sprintf(all, "HTTP/1.1 %d %s\r\ncontent-type: %s\r\ncontent-length: %zu\r\n\r\n", status,
                     status == 200 ? "OK" : "Not Found", type, n);
  memcpy(all + head, body, n);
  int result = push(c, all, head + n);
  free(all);
  return result;
}
static char *usage(char *p, const conn *c, long output, int details) {
  p = text(p, ",\"usage\":{\"prompt_tokens\":");
  p = number(p, c->prompt_tokens);
  p = text(p, ",\"total_tokens\":");
  p = number(p, c->prompt_tokens + output);
  p = text(p, ",\"completion_tokens\":");
  p = number(p, output);
  if (!details) return text(p, ",\"completion_tokens_details\":null}");
  p = text(p, ",\"prompt_tokens_details\":{\"cached_tokens\":");
  p = number(p, c->prompt_tokens / 2 / 16 * 16);
  return text(p, ",\"created_cache_tokens\":0}}");
}
static char start_of_event[256]; /* up to `"choices":[`; made once, because the model is an option */
enum { SIZE_ROOM = 8 };          /* in front of an event, for the chunk's size line */
static char *open_event(char *room) { return text(room + SIZE_ROOM, start_of_event); }
static int send_event(conn *c, char *room, char *end) {
  size_t n = end - (room + SIZE_ROOM);
  char size[SIZE_ROOM + 1];
  int head = sprintf(size, "%zx\r\n", n);
  char *from = room + SIZE_ROOM - head;
  memcpy(from, size, head);
  end = text(end, "\r\n");
  return push(c, from, end - from);
}
static int send_token(conn *c) {
  char room[1024], *p = open_event(room);
  uint64_t stamp = now_ns() / 100;
  long sent = c->chunks - --c->chunks_left;
  p = text(p, "{\"index\":0,\"delta\":{\"content\":\"@");
  for (int i = 15; i >= 0; i--, stamp /= 10) p[i] = '0' + stamp % 10;
  p = text(p + 16, c->chunks_left ? "\"},\"logprobs\":null,\"finish_reason\":null,\"token_ids\":null}]"
                                  : "\"},\"logprobs\":null,\"finish_reason\":\"length\",\"stop_reason\":null,\"token_ids\":null}]");
  if (c->usage_each) p = usage(p, c, sent, 0);
  p = text(p, "}\n\n");
  return send_event(c, room, p);
}
static int send_start(conn *c) {
  static const char HEAD[] = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
                             "transfer-encoding: chunked\r\n\r\n";
  if (push(c, HEAD, sizeof HEAD - 1)) return -1;
  char room[1024], *p = open_event(room);
  p = text(p, "{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,\"finish_reason\":null}]");
  if (c->usage_each) p = usage(p, c, 0, 0);
  return send_event(c, room, text(p, "}\n\n"));
}
static int send_end(conn *c) {
  end_stream(c);
  c->engine->finished++;
  c->engine->output_tokens += c->chunks;
  if (c->usage_at_end) {
    char room[1024], *p = open_event(room);
    p = usage(text(p, "]"), c, c->chunks, 1);
    if (send_event(c, room, text(p, ",\"system_fingerprint\":\"stub\"}\n\n"))) return -1;
  }
  static const char DONE[] = "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n";
  return push(c, DONE, sizeof DONE - 1);
}

/* ---- requests ---- */
/* The value after `key` in the first or last 2 KiB of a body: parameters stand around the messages, never inside. */
static const char *value_of(const char *body, size_t n, const char *key) {
  size_t part = n < 2048 ? n : 2048, key_size = strlen(key);
  const char *p = memmem(body + n - part, part, key, key_size), *end = body + n;
  if (!p) p = memmem(body, part, key, key_size);
  if (!p) return NULL;
  for (p += key_size; p < end && (*p == ' ' || *p == ':'); p++) {}
  return p < end ? p : NULL;
}
static int is_true(const char *body, size_t n, const char *key) {
  const char *p = value_of(body, n, key);
  return p && body + n - p >= 4 && !memcmp(p, "true", 4);
}
static long integer(const char *body, size_t n, const char *key, long otherwise) {
  const char *p = value_of(body, n, key);
  return p && *p >= '0' && *p <= '9' ? strtol(p, NULL, 10) : otherwise;
}
static int complete(conn *c, const char *body, size_t n) {
  engine *e = c->engine;
  long tokens = integer(body, n, "\"max_tokens\"", integer(body, n, "\"max_completion_tokens\"", 2));
  c->chunks = tokens < 1 ? 1 : tokens > CHUNKS_MAX ? CHUNKS_MAX : tokens;
  c->prompt_tokens = n / 4;
  e->requests++;
  e->prompt_tokens += c->prompt_tokens;
  e->cached_tokens += c->prompt_tokens / 2 / 16 * 16;
  if (!is_true(body, n, "\"stream\"")) {
    char json[1024], *p = json;
    e->output_tokens += c->chunks, e->finished++;
    p = text(p, "{\"id\":\"chatcmpl-0000000000000000\",\"object\":\"chat.completion\",\"created\":1700000000,\"model\":\"");
    p = text(text(p, model), "\",\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"ok then\"},"
                             "\"logprobs\":null,\"finish_reason\":\"stop\"}]");
    p = text(usage(p, c, c->chunks, 1), "}");
    return answer(c, 200, "application/json", json, p - json);
  }
  c->usage_at_end = is_true(body, n, "\"include_usage\"");
  c->usage_each = c->usage_at_end && is_true(body, n, "\"continuous_usage_stats\"");
  c->interval_ns = integer(body, n, "\"seed\"", 0) * 1000;
  c->chunks_left = c->chunks;
  if (send_start(c)) return -1;
  if (c->interval_ns && heap_used < STREAMS_MAX) {
    c->streaming = 1, e->running++;
    c->due_ns = now_ns() + c->interval_ns;
    heap_up(heap_used++, c);
    return 0;
  }
  while (c->chunks_left) if (send_token(c)) return -1;
  return send_end(c);
}
static int render(conn *c, const char *body, size_t n) {
  size_t ids = n / 4;
  char *json = malloc(ids * 6 + 256), *p = text(json, "{\"request_id\":\"stub\",\"model\":\"");
  p = text(text(p, model), "\",\"sampling_params\":{},\"token_ids\":[");
  for (size_t i = 0; i < ids; i++) {
    uint32_t word;
    memcpy(&word, body + 4 * i, 4);
    if (i) *p++ = ',';
    p = number(p, word * 2654435761u >> 17); /* below 32768: five digits */
  }
  p = text(p, "]}");
  c->engine->renders++;
  int result = answer(c, 200, "application/json", json, p - json);
  free(json);
  return result;
}
static int metrics(conn *c) {
  engine *e = c->engine;
  struct { const char *type, *name; uint64_t value; } rows[] = {
      {"gauge", "vllm:num_requests_running", e->running},
      {"gauge", "vllm:num_requests_waiting", 0},
      {"gauge", "vllm:kv_cache_usage_perc", 0},
      {"counter", "vllm:prefix_cache_queries_total", e->prompt_tokens},
      {"counter", "vllm:prefix_cache_hits_total", e->cached_tokens},
      {"counter", "vllm:prompt_tokens_total", e->prompt_tokens},
      {"counter", "vllm:generation_tokens_total", e->output_tokens},
      {"counter", "vllm:request_success_total", e->finished},
      {"counter", "stub_requests_total", e->requests},
      {"counter", "stub_render_total", e->renders},
      {"counter", "stub_unknown_total", e->unknown},
  };
  char page[4096], *p = page;
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
    p += sprintf(p, "# TYPE %s %s\n%s{engine=\"0\",model_name=\"%.64s\"} %lu\n", rows[i].name, rows[i].type, rows[i].name,
                 model, (unsigned long)rows[i].value);
  return answer(c, 200, "text/plain; version=0.0.4", page, p - page);
}
static int starts(const char *line, const char *with) { return !strncmp(line, with, strlen(with)); }
static int respond(conn *c, const char *line, const char *body, size_t n) {
  char json[1024];
  if (starts(line, "POST /v1/chat/completions ") || starts(line, "POST /v1/completions ")) return complete(c, body, n);
  if (starts(line, "POST /v1/chat/completions/render ") || starts(line, "POST /tokenize ")) return render(c, body, n);
  if (starts(line, "GET /metrics")) return metrics(c);
  if (starts(line, "GET /v1/models")) {
    int size = snprintf(json, sizeof json,
                        "{\"object\":\"list\",\"data\":[{\"id\":\"%.64s\",\"object\":\"model\",\"created\":1700000000,"
                        "\"owned_by\":\"vllm\",\"root\":\"%.64s\",\"max_model_len\":262144}]}", model, model);
    return answer(c, 200, "application/json", json, size);
  }
  if (starts(line, "GET /get_model_info") || starts(line, "GET /model_info") || starts(line, "GET /server_info") ||
      starts(line, "GET /get_server_info")) {
    int size = snprintf(json, sizeof json,
                        "{\"model_path\":\"%.64s\",\"tokenizer_path\":\"%.64s\",\"model_id\":\"%.64s\","
                        "\"served_model_name\":\"%.64s\",\"is_generation\":true,\"dp_size\":1,\"version\":\"0\"}",
                        model, model, model, model);
    return answer(c, 200, "application/json", json, size);
  }
  if (starts(line, "GET /version")) return answer(c, 200, "application/json", "{\"version\":\"0.32.0\"}", 20);
  if (starts(line, "GET /health") || starts(line, "GET /ping")) return answer(c, 200, "application/json", "{}", 2);
  c->engine->unknown++;
  return answer(c, 404, "application/json", "{\"detail\":\"Not Found\"}", 22);
}
static char *header(char *head, const char *name) { /* its value in a NUL-ended head, or NULL */
  char *p = strcasestr(head, name);
  return p ? p + strlen(name) : NULL;
}
/* Joins a chunked body in place. Returns 1 when all of it is there, 0 when not. */
static int join_chunks(char *at, size_t n, size_t *body, size_t *used) {
  size_t from = 0, to = 0;
  for (int writes = 0; writes < 2; writes++) { /* first look whether it is complete, then move */
    for (from = to = 0;;) {
      char *line_end = memmem(at + from, n - from, "\r\n", 2);
      if (!line_end) return 0;
      size_t size = strtoul(at + from, NULL, 16), start = line_end - at + 2;
      if (start + size + 2 > n) return 0;
      from = start + size + 2;
      if (!size) break;
      if (writes) memmove(at + to, at + start, size);
      to += size;
    }
  }
  *body = to, *used = from;
  return 1;
}
static int work(conn *c) { /* answers every complete request that was read; -1: close */
  while (c->in_used && !c->streaming) {
    char *end = memmem(c->in, c->in_used, "\r\n\r\n", 4);
    if (!end) return c->in_used > 65536 ? -1 : 0;
    size_t head = end - c->in + 4, body = 0, used = 0;
    end[2] = 0;
    char *length = header(c->in, "\r\ncontent-length:");
    int chunked = !length && header(c->in, "\r\ntransfer-encoding: chunked");
    int last = header(c->in, "\r\nconnection: close") != NULL;
    if (length) used = body = strtoul(length, NULL, 10);
    if (chunked ? !join_chunks(c->in + head, c->in_used - head, &body, &used) : c->in_used < head + used) {
      end[2] = '\r';
      return used > BODY_MAX || c->in_used > BODY_MAX ? -1 : 0;
    }
    if (respond(c, c->in, c->in + head, body)) return -1;
    c->in_used -= head + used;
    memmove(c->in, c->in + head + used, c->in_used);
    if (last && !c->streaming) return -1;
  }
  return 0;
}
static int take_in(conn *c) {
  if (c->in_size - c->in_used < 65536) {
    c->in_size = c->in_size ? c->in_size * 2 : 131072;
    c->in = realloc(c->in, c->in_size);
  }
  ssize_t n = recv(c->fd, c->in + c->in_used, c->in_size - c->in_used, 0);
  if (n < 0) return errno == EAGAIN ? 0 : -1;
  if (n == 0) return -1;
  c->in_used += n;
  return work(c);
}
static void accept_all(conn *door) {
  for (int fd, one = 1; (fd = accept4(door->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0;) {
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    conn *c = calloc(1, sizeof *c);
    c->fd = fd, c->engine = door->listens;
    watch(c, EPOLL_CTL_ADD, EPOLLIN);
  }
}
static void run_timers(uint64_t now) {
  while (heap_used && heap[0]->due_ns <= now) {
    conn *c = heap[0];
    int gone = send_token(c);
    if (!gone && c->chunks_left) {
      c->due_ns += c->interval_ns;
      heap_down(0, c);
      continue;
    }
    if (gone || send_end(c) || work(c)) drop(c);
  }
}
static void open_ports(void) {
  printf("{\"ports\":[");
  for (int i = 0; i < engine_count; i++) {
    engine *e = &engines[i];
    int one = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof a;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(fd, (void *)&a, sizeof a) || listen(fd, 4096) || getsockname(fd, (void *)&a, &size)) {
      perror("stub: listen");
      exit(1);
    }
    e->fd = fd, e->port = ntohs(a.sin_port);
    conn *door = calloc(1, sizeof *door);
    door->fd = fd, door->listens = e;
    watch(door, EPOLL_CTL_ADD, EPOLLIN);
    printf("%s%d", i ? "," : "", e->port);
  }
  printf("]}\n");
  fflush(stdout);
}
int main(int count, char **args) {
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (count % 2 == 0) { fprintf(stderr, "stub: %s needs a value\n", args[count - 1]); return 2; }
  for (int i = 1; i + 1 < count; i += 2) {
    if (!strcmp(args[i], "--ports")) engine_count = atoi(args[i + 1]);
    else if (!strcmp(args[i], "--model")) model = args[i + 1];
    else { fprintf(stderr, "stub: unknown option %s; known are --ports and --model\n", args[i]); return 2; }
  }
  if (engine_count < 1 || engine_count > PORTS_MAX || strlen(model) > 64) {
    fprintf(stderr, "stub: --ports is 1 to %d, --model has at most 64 characters\n", PORTS_MAX);
    return 2;
  }
  snprintf(start_of_event, sizeof start_of_event,
           "data: {\"id\":\"chatcmpl-0000000000000000\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,"
           "\"model\":\"%s\",\"choices\":[", model);
  poll_fd = epoll_create1(EPOLL_CLOEXEC);
  open_ports();
  struct epoll_event events[512];
  for (;;) {
    struct timespec wait, *patience = NULL;
    if (heap_used) {
      uint64_t now = now_ns(), left = heap[0]->due_ns > now ? heap[0]->due_ns - now : 0;
      wait.tv_sec = left / 1000000000, wait.tv_nsec = left % 1000000000;
      patience = &wait;
    }
    int n = epoll_pwait2(poll_fd, events, 512, patience, NULL);
    if (n < 0 && errno != EINTR) { perror("stub: epoll"); return 1; }
    for (int i = 0; i < n; i++) {
      conn *c = events[i].data.ptr;
      if (c->listens) { accept_all(c); continue; }
      if (c->fd < 0) continue;
      int gone = events[i].events & EPOLLOUT && c->out_used ? flush(c) : 0;
      if (!gone && events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) gone = take_in(c);
      if (gone) drop(c);
    }
    if (heap_used) run_timers(now_ns());
    bury();
  }
}
