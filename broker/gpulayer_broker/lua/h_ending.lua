-- Shared: how an attempt or a job ends. Every road out of `scheduled` and `running` goes through H.finish or H.again.

local FIELDS = {'state', 'seq', 'sig', 'owner', 'prio', 'queue', 'attempt', 'kind', 'client', 'token', 'worker', 'node', 'lots',
                'entry', 'cancel', 'count', 'ended_token', 'policy', 'permit', 'keep_ms', 'ranks', 'lane', 'ride',
                'earmark'}
local OF_CHUNKS = {'parent', 'from', 'to'}

-- the fields of a job that transitions need; nil where there is no such job. A chunk is told by its id
function H.load(P, id)
  local v = redis.pcall('HMGET', H.job(P, id), unpack(FIELDS))
  if v.err or not v[1] then return nil end
  local j = {id = id, parent = ''}
  for i, f in ipairs(FIELDS) do j[f] = v[i] or '' end
  if string.find(id, '/', 1, true) then
    local its = redis.call('HMGET', H.job(P, id), unpack(OF_CHUNKS))
    for i, f in ipairs(OF_CHUNKS) do j[f] = its[i] or '' end
  end
  return j
end

-- the fence: only the holder of the current token may report
function H.holds(j, token) return j ~= nil and (j.state == 'running' or j.state == 'scheduled') and token ~= '' and j.token == token end

-- marks the end of each rank's log and lets the live tail go after an hour
function H.close_log(P, j)
  if j.is_alone then return end
  for rank = 0, tonumber(j.ranks ~= '' and j.ranks or '1') - 1 do
    local key = P .. 'log:' .. j.id .. ':' .. j.attempt .. ':' .. rank
    local last = redis.pcall('XREVRANGE', key, '+', '-', 'COUNT', 1)
    if last[1] then
      local top = tonumber(string.match(last[1][1], '^%d+'))
      redis.call('XADD', key, string.format('%d-1', top), 'end', j.attempt)
      redis.call('XTRIM', key, 'MINID', string.format('%d-0', math.max(0, top - 262144)))
      redis.call('EXPIRE', key, 3600)
    end
  end
end

-- what of its record tells that nobody holds an attempt any more. Only a holder that ended it itself (j.reported) is answered
-- `already` when it repeats its call: who was taken for lost is stale
local function unheld(j, fields)
  local n = #fields
  fields[n + 1], fields[n + 2], fields[n + 3], fields[n + 4] = 'token', '', 'ended_token', j.reported and j.token or ''
  if j.ride ~= '' then fields[n + 5], fields[n + 6] = 'ride', '' end
  return fields
end

-- takes an attempt off its worker and its devices
function H.let_go(P, j, now)
  local useful = H.free(P, j, j.id .. '/' .. j.token)
  if useful then H.poke_siblings(P, j.node, j.worker, now) end
end

-- an attempt is over, with `fields` for its record; nothing of it may report afterwards
function H.detach(P, j, fields, now)
  redis.call('HSET', H.job(P, j.id), unpack(unheld(j, fields)))
  H.let_go(P, j, now)
end

H.INLINE = 16384

-- what `fields` bring of a result, or an array's record has
local function small_result(P, j, fields)
  local result, kind
  for i = 1, #fields, 2 do
    if fields[i] == 'result' then result = fields[i + 1] elseif fields[i] == 'result_kind' then kind = fields[i + 1] end
  end
  if j.count ~= '' then result, kind = unpack(redis.call('HMGET', H.job(P, j.id), 'result', 'result_kind')) end
  if not result or #result > H.INLINE then return '', 'fetch' end
  return result, kind or ''
end

-- tells everybody who waits for this job, each on a stream of their own
local function tell(P, j, state, fields)
  local key = P .. 'watchers:' .. j.id
  local who = j.is_alone and {} or redis.call('SMEMBERS', key)
  local submitter = j.client ~= '' and j.client or nil
  if #who > 0 then
    redis.call('DEL', key)
    for _, watcher in ipairs(who) do
      if watcher == submitter then submitter = nil end
    end
  end
  who[#who + 1] = submitter
  if #who == 0 then return end
  local result, kind = small_result(P, j, fields)
  for _, client in ipairs(who) do
    local done = P .. 'done:' .. client
    redis.call('XADD', done, 'MAXLEN', '~', 100000, '0-*', 'job', j.id, 'state', state, 'kind', kind, 'result', result)
    H.keep(done, 3600000)
  end
end

-- a final state: indexes, counters, logs, waiters. `fields` are name, value, … for the record, which the call takes over
function H.finish(P, j, state, reason, fields, now)
  if j.parent ~= '' then return H.end_chunk(P, j, state, reason, fields, now) end
  if j.earmark ~= '' then H.lift(P, j.earmark, j.id, now) end
  local from, n = j.state, #fields
  if j.kind == 'message' then H.expire(P, j, state, fields, now)
  elseif j.keep_ms ~= '' then redis.call('ZADD', P .. 'expiring', now + j.keep_ms, j.id) end
  fields[n + 1], fields[n + 2], fields[n + 3], fields[n + 4] = 'state', state, 'phase', ''
  fields[n + 5], fields[n + 6], fields[n + 7], fields[n + 8] = 'end_reason', reason, 'ended_ms', now
  if j.count == '' and (from == 'running' or from == 'scheduled') then
    H.close_log(P, j)
    H.detach(P, j, fields, now)
    H.drop_held(P, j.sig, j.owner, j.prio, j.entry)
  else
    redis.call('HSET', H.job(P, j.id), unpack(fields))
    if j.entry ~= '' then H.drop_entry(P, j.sig, j.owner, j.prio, j.entry) end
    if from == 'queued' then redis.call('ZREM', P .. 'delayed', j.id) end
  end
  H.index(P, j.id, from, state, j.seq)
  H.place(P .. 'jobs:final', j.id, now)
  H.leave_queue(P, j, now)
  H.leave_gates(P, j, now)
  if state == 'failed' then redis.call('ZADD', P .. 'dead:' .. j.queue, now, j.id) end
  H.event(P, j.id, state)
  tell(P, j, state, fields)
  if not j.is_alone then H.release_dependents(P, j.id, state, now) end
end

function H.leave_queue(P, j, now)
  if H.count(P .. 'sigjobs', j.sig, -1) <= 0 then redis.call('ZADD', P .. 'idlesigs', now, j.sig) end
end

-- a job whose cancel was asked for ends so, whatever its attempt came to
function H.end_or(P, j, now, otherwise)
  if j.cancel ~= '' then
    H.finish(P, j, 'cancelled', 'cancelled', {}, now)
    return 'cancelled'
  end
  return otherwise()
end

-- the attempt is over and the job waits again at its old age
function H.again(P, j, phase, now)
  if j.parent ~= '' then return H.chunk_again(P, j, 0, now) end
  local from = j.state
  H.close_log(P, j)
  H.detach(P, j, {'state', 'queued', 'phase', phase, 'queued_ms', now}, now)
  H.put_back(P, j.sig, j.owner, j.prio, j.entry)
  H.index(P, j.id, from, 'queued', j.seq)
  H.event(P, j.id, 'queued')
  H.ring(P, j.sig, now, nil, j)
end

-- the attempt is over and the job becomes runnable after a delay, at a new age
function H.later(P, j, fields, delay_ms, now)
  if j.parent ~= '' then return H.chunk_again(P, j, 0, now) end
  local from = j.state
  local n = #fields
  fields[n + 1], fields[n + 2], fields[n + 3], fields[n + 4] = 'state', 'queued', 'phase', 'retrying'
  fields[n + 5], fields[n + 6] = 'entry', ''
  H.close_log(P, j)
  H.detach(P, j, fields, now)
  H.drop_held(P, j.sig, j.owner, j.prio, j.entry)
  H.index(P, j.id, from, 'queued', j.seq)
  H.free_permit(P, j, now)
  H.delay(P, j.id, now + delay_ms)
  H.event(P, j.id, 'queued')
end

-- the worker was lost under this attempt: counted apart from retries, the third (by default) ends the job
function H.lost(P, j, now)
  return H.end_or(P, j, now, function()
    local losses = H.digits(redis.call('HGET', H.job(P, j.id), 'losses')) + 1
    redis.call('HSET', H.job(P, j.id), 'losses', losses)
    if (j.parent == '' or j.to - j.from == 1) and losses >= H.config(P, 'lost_workers', 3) then
      local error = '{"type":"WorkerLost","message":"' .. losses .. ' workers were lost while they ran this job"}'
      H.finish(P, j, 'failed', 'worker_lost', {'error', error}, now)
      return 'failed'
    end
    if j.parent ~= '' then H.chunk_again(P, j, losses, now) else H.again(P, j, 'retrying', now) end
    return 'queued'
  end)
end

-- whether another worker has shown itself within the last minute, and is not put aside itself; a hundred are asked
local function has_company(P, w, now)
  for _, other in ipairs(redis.call('ZRANGEBYSCORE', P .. 'workers', now - 60000, '+inf', 'LIMIT', 0, 100)) do
    local until_ms = redis.call('HGET', P .. 'worker:' .. other, 'quarantined_until')
    if other ~= w and (tonumber(until_ms or '0') or 0) <= now then return true end
  end
  return false
end

-- a death of a worker counts once, on one of the jobs it took along; three different ones without a success between
-- put the worker aside for ten minutes, unless it is the only one left
function H.count_death(P, w, lost, now)
  if #lost == 0 then return end
  local key = P .. 'deaths:' .. w
  for _, id in ipairs(lost) do
    if redis.call('SISMEMBER', key, id) == 1 then return end
  end
  redis.call('SADD', key, lost[1])
  redis.call('EXPIRE', key, 86400)
  if redis.call('SCARD', key) >= 3 and has_company(P, w, now) then
    redis.call('HSET', P .. 'worker:' .. w, 'quarantined_until', now + 600000)
    redis.call('DEL', key)
  end
end
