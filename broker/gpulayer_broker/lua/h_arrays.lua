-- Shared: arrays. One record stands for `count` calls of one function; workers take ranges of it, as chunks. A chunk is a
-- record of its own while it is out, `job:<id>/<n>`, with a token, a lease and holdings like any attempt, so that renewals,
-- cancels and losses treat it as one; it is in no index of states and goes when it ends.
-- array:<id> cursor, done, failed, mean_us, since (items since its last new age); ranges:<id> what came back, `from to losses`;
-- chunks:<id> the chunks that are out; pages:<id> first item -> outcomes of a range, packed by the worker.

H.CHUNK_US = 20000
H.CHUNK_MOST = 1000
H.TURN_ITEMS = 64
H.TURN_US = 1000000

local function array_key(P, id) return P .. 'array:' .. id end

-- how many items are worth about 20 ms; the first chunk is one item
local function chunk_size(mean_us)
  if not mean_us then return 1 end
  return math.max(1, math.min(H.CHUNK_MOST, math.floor(H.CHUNK_US / math.max(1, mean_us))))
end

-- the next range: what came back first (a range that lost its worker item by item), then the cursor
local function next_range(P, id, count)
  local cursor, mean_us = unpack(redis.call('HMGET', array_key(P, id), 'cursor', 'mean_us'))
  cursor = tonumber(cursor or '0')
  local size = chunk_size(tonumber(mean_us or nil))
  local back = redis.call('LPOP', P .. 'ranges:' .. id)
  if back then
    local from, to, losses = string.match(back, '^(%d+) (%d+) (%d+)$')
    from, to, losses = tonumber(from), tonumber(to), tonumber(losses)
    local stop = losses > 0 and from + 1 or math.min(to, from + size)
    if stop < to then redis.call('LPUSH', P .. 'ranges:' .. id, stop .. ' ' .. to .. ' ' .. losses) end
    return from, stop, losses
  end
  if cursor >= count then return nil end
  local stop = math.min(count, cursor + size)
  redis.call('HSET', array_key(P, id), 'cursor', stop)
  return cursor, stop, 0
end

local function has_more(P, id, count)
  return redis.call('EXISTS', P .. 'ranges:' .. id) == 1
    or tonumber(redis.call('HGET', array_key(P, id), 'cursor') or '0') < count
end

-- the entry stays the head while items are left; after a turn, 64 items that take a second or more, an array behind which others
-- wait, whoever's they are, takes a new age
local function keep_in_line(P, c, id, entry, items)
  local since = redis.call('HINCRBY', array_key(P, id), 'since', items)
  local took_us = since * (tonumber(redis.call('HGET', array_key(P, id), 'mean_us') or nil) or H.TURN_US)
  local alone = redis.call('EXISTS', P .. 'waiting:' .. c.prio) == 0
  if since < H.TURN_ITEMS or took_us < H.TURN_US or alone then
    H.put_back(P, c.sig, c.owner, c.prio, entry)
    return entry
  end
  redis.call('HSET', array_key(P, id), 'since', 0)
  H.drop_entry(P, c.sig, c.owner, c.prio, entry)
  return H.append(P, id, c.sig, c.owner, c.prio, H.next_age(P))
end

-- takes a range of an array for a worker; the record of the new chunk's id and token
function H.grant_chunk(P, o, w, room, c, n, id, entry, v, now)
  local count, key = tonumber(v.count), H.job(P, id)
  local from, to, losses = next_range(P, id, count)
  if not from then
    H.drop_entry(P, c.sig, c.owner, c.prio, entry)
    redis.call('HSET', key, 'entry', '')
    return nil
  end
  local attempt = redis.call('HINCRBY', key, 'attempt', 1)
  local token, chunk = attempt .. ':' .. o.nonce .. n, id .. '/' .. attempt
  local lots = H.hold(P, o, w, room, c.need, c.lots, chunk, token)
  redis.call('HSET', H.job(P, chunk), 'state', 'running', 'kind', 'chunk', 'parent', id, 'from', from, 'to', to, 'losses', losses,
             'token', token, 'worker', o.worker, 'node', w.node, 'lots', lots, 'sig', c.sig, 'owner', c.owner, 'prio', c.prio,
             'queue', v.queue, 'attempt', attempt, 'granted_ms', now, 'started_ms', now,
             'on_outage', redis.call('HGET', key, 'on_outage') or '')
  redis.call('SADD', P .. 'chunks:' .. id, chunk)
  redis.call('ZADD', P .. 'leases', now + o.lease + w.grace, chunk)
  redis.call('SADD', P .. 'running:' .. o.worker, chunk)
  redis.call('HINCRBY', P .. 'owners', c.owner, 1)
  if v.state == 'queued' then
    redis.call('HSET', key, 'state', 'running', 'phase', '', 'worker', o.worker, 'granted_ms', now, 'started_ms', now)
    H.index(P, id, 'queued', 'running', v.seq)
    H.event(P, id, 'running')
  end
  if has_more(P, id, count) then
    redis.call('HSET', key, 'entry', keep_in_line(P, c, id, entry, to - from))
    H.ring(P, c.sig, now, o.worker, c)
  else
    H.drop_entry(P, c.sig, c.owner, c.prio, entry)
    redis.call('HSET', key, 'entry', '')
  end
  return chunk, token
end

-- the chunk leaves its worker; of its record only what answers a repeated report stays, for a minute
local function drop_chunk(P, j, now)
  H.close_log(P, j)
  local key = H.job(P, j.id)
  redis.call('SREM', P .. 'chunks:' .. j.parent, j.id)
  redis.call('DEL', key)
  redis.call('HSET', key, 'state', 'ended', 'parent', j.parent, 'ended_token', j.reported and j.token or '')
  redis.call('PEXPIREAT', key, now + 60000)
  H.let_go(P, j, now)
end

-- the array is final when every item has an outcome, or when its cancel was asked for and no chunk is out
local function settle(P, id, now)
  local a = H.load(P, id)
  if not a or H.FINAL[a.state] then return end
  local done, failed = unpack(redis.call('HMGET', array_key(P, id), 'done', 'failed'))
  if tonumber(done or '0') >= tonumber(a.count) then
    local bad = tonumber(failed or '0') > 0
    return H.finish(P, a, bad and 'failed' or 'succeeded', bad and 'user_error' or '', {}, now)
  end
  if a.cancel ~= '' and redis.call('EXISTS', P .. 'chunks:' .. id) == 0 then H.finish(P, a, 'cancelled', 'cancelled', {}, now) end
end

-- who submitted the array, and who watches it
local function listeners(P, id)
  local who, client = {}, redis.call('HGET', H.job(P, id), 'client')
  if client and client ~= '' then who[client] = true end
  for _, watcher in ipairs(redis.call('SMEMBERS', P .. 'watchers:' .. id)) do who[watcher] = true end
  return who
end

-- items [from, to) of the array have the outcomes of this page; whoever waits is told
function H.page(P, id, from, to, failed, page)
  redis.call('HSET', P .. 'pages:' .. id, from, page)
  redis.call('HINCRBY', array_key(P, id), 'done', to - from)
  if failed > 0 then redis.call('HINCRBY', array_key(P, id), 'failed', failed) end
  local inline = #page <= H.INLINE and page or ''
  for client in pairs(listeners(P, id)) do
    local done = P .. 'done:' .. client
    redis.call('XADD', done, 'MAXLEN', '~', 100000, '0-*', 'job', id, 'state', 'items', 'kind', from .. ' ' .. to, 'result', inline)
    redis.call('PEXPIRE', done, 3600000)
  end
end

-- hands a range back; the array's entry is made again where it had left the stream
function H.give_back(P, id, from, to, losses, now)
  local a = H.load(P, id)
  if not a or H.FINAL[a.state] or a.cancel ~= '' then return end
  redis.call('RPUSH', P .. 'ranges:' .. id, from .. ' ' .. to .. ' ' .. losses)
  if a.entry == '' then
    redis.call('HSET', H.job(P, id), 'entry', H.append(P, id, a.sig, a.owner, a.prio, H.next_age(P)))
  end
  H.ring(P, a.sig, now, nil, a)
end

-- a chunk ends without its worker's report: cancelled, handed back, or with all its items failed for one reason
function H.end_chunk(P, j, state, reason, fields, now)
  drop_chunk(P, j, now)
  if state == 'cancelled' then
    H.give_back(P, j.parent, j.from, j.to, 0, now)  -- where the chunk alone was cancelled: a cancelled array takes nothing back
  else
    local why = '{"type":"' .. (reason == 'worker_lost' and 'WorkerLost' or 'Failed') .. '","message":""}'
    for i = 1, #fields, 2 do if fields[i] == 'error' then why = fields[i + 1] end end
    H.page(P, j.parent, tonumber(j.from), tonumber(j.to), j.to - j.from, '!' .. j.to .. ' ' .. reason .. ' ' .. why)
  end
  settle(P, j.parent, now)
end

function H.chunk_again(P, j, losses, now)
  drop_chunk(P, j, now)
  H.give_back(P, j.parent, j.from, j.to, losses, now)
  settle(P, j.parent, now)
end

-- the worker's report: outcomes of [from, upto), the rest goes back uncounted
function H.end_items(P, j, upto, failed, took_us, page, now)
  local from, to = tonumber(j.from), tonumber(j.to)
  drop_chunk(P, j, now)
  if upto > from then
    local old = tonumber(redis.call('HGET', array_key(P, j.parent), 'mean_us') or nil)
    local mean_us = took_us / (upto - from)
    redis.call('HSET', array_key(P, j.parent), 'mean_us', string.format('%.1f', old and (old + mean_us) / 2 or mean_us))
    H.page(P, j.parent, from, upto, failed, page)
  end
  if upto < to then H.give_back(P, j.parent, upto, to, 0, now) end
  settle(P, j.parent, now)
end

-- an array is to end: what waits leaves, the holders of chunks are told
function H.cancel_array(P, a, now)
  if a.cancel ~= '' then return {'asked'} end
  redis.call('HSET', H.job(P, a.id), 'cancel', now, 'entry', '')
  if a.earmark ~= '' then H.lift(P, a.earmark, a.id, now) end
  if a.entry ~= '' then H.drop_entry(P, a.sig, a.owner, a.prio, a.entry) end
  a.entry, a.cancel = '', tostring(now)
  for _, chunk in ipairs(redis.call('SMEMBERS', P .. 'chunks:' .. a.id)) do
    local worker = redis.call('HGET', H.job(P, chunk), 'worker')
    redis.call('HSET', H.job(P, chunk), 'cancel', now)
    if worker then H.mail(P, worker, 'cancel', 'job', chunk) end
  end
  settle(P, a.id, now)
  return {H.FINAL[H.load(P, a.id).state] and 'cancelled' or 'asked'}
end

function H.forget_array(P, id) redis.call('DEL', array_key(P, id), P .. 'ranges:' .. id, P .. 'pages:' .. id, P .. 'chunks:' .. id) end
